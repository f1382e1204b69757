"""Streaming parsers of replies: content, reasoning and tool calls from a model's text.

How a model writes these depends on its chat template. `detect_format` names the format from the template's source,
`reply_parser` returns the `StreamParser` for it, whose parts are values of `parts.py`:

    parser = reply_parser(detect_format(template.source) or "hermes", prompt=prompt)
    for delta in deltas:              # text with special tokens: TextStream(tokenizer, skip_special=False)
        for part in parser.feed(delta): ...
    for part in parser.finish(): ...

The parts do not depend on how the text is split into deltas. A malformed call is a `BadToolCall`, never an exception.
Limits are `ParseLimits`.
"""

from __future__ import annotations

from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr
from headway.text.replies.harmony import Harmony
from headway.text.replies.llama import Llama
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
from headway.text.replies.state_machine import StreamParser
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
    "detect_format",
    "reply_parser",
]

FORMATS: dict[str, type[StreamParser]] = {
    "qwen": Tagged,
    "hermes": Tagged,
    "llama": Llama,
    "mistral": Mistral,
    "harmony": Harmony,
}
"""The known formats. `qwen` and `hermes` have the same parser; templates of the first also write reasoning."""

_OTHER_CALLS = ("<function=", "<arg_key>", "<｜tool", "<TOOLCALL>", "<|tool_call|>")  # of unsupported formats


def reply_parser(format: str, *, prompt: str = "", limits: ParseLimits | None = None) -> StreamParser:
    """A parser for one reply in `format`.

    `prompt` is the rendered prompt, or its end: some templates open the reasoning there.
    """
    if format not in FORMATS:
        raise InvalidInput(
            f"the reply format {short_repr(format)} is not known; it must be one of {', '.join(FORMATS)}"
        )
    return FORMATS[format](limits, prompt)


def detect_format(template_source: str) -> str | None:
    """The reply format of a chat template, by its markers; None if it has no known one."""
    if not isinstance(template_source, str):
        raise WrongType(f"the template is a {type(template_source).__name__}; it must be Jinja source as a str")
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
