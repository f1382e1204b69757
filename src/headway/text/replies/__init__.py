"""Replies as they arrive: content, reasoning and tool calls, out of a model's text.

A chat template decides how a model writes these. `detect` names the format from the template's source, `parser` makes
the `StreamParser` for it, and its parts are values of `text/replies/parts.py`:

    parse = parser(detect(template.source) or "hermes", prompt=prompt)
    for delta in deltas:              # text that shows special tokens: TextStream(tokenizer, skip_special=False)
        for part in parse.feed(delta): ...
    for part in parse.finish(): ...

The text may be split anywhere between two characters: the parts add up to the same. A call that cannot be read is a
`BadToolCall`, never an exception. Limits are `ParseLimits`.
"""

from __future__ import annotations

from headway.base.errors import InvalidInput, WrongType
from headway.text.replies.harmony import Harmony
from headway.text.replies.llama import Llama
from headway.text.replies.machine import StreamParser
from headway.text.replies.mistral import Mistral
from headway.text.replies.parts import (
    BadToolCall,
    Content,
    ParseLimits,
    Part,
    Reasoning,
    Reply,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from headway.text.replies.tagged import Tagged

__all__ = [
    "FORMATS",
    "BadToolCall",
    "Content",
    "ParseLimits",
    "Part",
    "Reasoning",
    "Reply",
    "StreamParser",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "collect",
    "detect",
    "parser",
]

FORMATS: dict[str, type[StreamParser]] = {
    "qwen": Tagged,
    "hermes": Tagged,
    "llama": Llama,
    "mistral": Mistral,
    "harmony": Harmony,
}
"""The known formats. `qwen` and `hermes` are read alike; templates of the first also write reasoning."""

_OTHER_CALLS = ("<function=", "<arg_key>", "<｜tool", "<TOOLCALL>", "<|tool_call|>")  # formats not known here


def parser(format: str, *, prompt: str = "", limits: ParseLimits | None = None) -> StreamParser:
    """A parser for one reply in `format`.

    `prompt` is the rendered prompt before the reply, or its end: some templates open the reasoning there.
    """
    if format not in FORMATS:
        raise InvalidInput(f"there is no reply format {format!r:.80}; the known ones are {', '.join(FORMATS)}")
    return FORMATS[format](limits, prompt)


def detect(template_source: str) -> str | None:
    """The format that a chat template writes replies in, by its markers; None when it has none that is known."""
    if not isinstance(template_source, str):
        raise WrongType(f"the template is a {type(template_source).__name__}; it should be Jinja source as a str")
    has = template_source.__contains__
    if has("<|channel|>") and has("<|message|>"):
        return "harmony"
    if has("[TOOL_CALLS]"):
        return "mistral"
    if any(map(has, _OTHER_CALLS)):
        return None
    if has("<tool_call>"):
        return "qwen" if has("</think>") else "hermes"
    if has("<|python_tag|>") or (has("<|start_header_id|>") and has('"parameters"') and has("tool_calls")):
        return "llama"
    return "qwen" if has("</think>") else None
