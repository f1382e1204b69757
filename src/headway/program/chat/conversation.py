"""A context's conversation: its messages, their rendering by the chat template, and the tokens each verb adds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import TemplateError, Unsupported
from headway.base.text import find_all, replace_all
from headway.program.checks.ids import common
from headway.text.templates.chat_template import MAX_DEPTH, ChatTemplate
from headway.text.templates.messages import describe_tools
from headway.text.tokenizer import Tokenizer

STAND_IN = "headway"  # an assistant text, to find what the template puts after one
PRIVATE = 0xF0000  # code points that hide names of special tokens inside messages; the one after them escapes
REWRITES = (
    "the chat template rewrites earlier messages when this one is added, so it cannot be appended; "
    "start a new context with all messages"
)


@dataclass(frozen=True)
class Conversation:
    """The messages so far and their rendering; `cued` when it ends with the generation prompt.

    `transcript` is what verbs and model wrote: all the text of the context, unless something else was filled in too.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    rendered: str = ""
    cued: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = field(default=None)
    described: bool = False  # the system message has the tools, because the template has no place for them
    transcript: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the template, such as enable_thinking


class ChatWriter:
    """Converts chat verbs to tokens with a model's own template."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        self.template, self.tokenizer = template, tokenizer
        names = sorted((tokenizer.token_text(i) for i in tokenizer.special_ids), key=len, reverse=True)
        self._names = [n for n in names if n]
        self._special = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._hiding = re.compile(f"{self._special.pattern}|[{chr(PRIVATE)}-{chr(PRIVATE + len(self._names))}]")

    def add(self, old: Conversation, message: Mapping[str, Any]) -> tuple[Conversation, list[int]]:
        """The conversation with one more message, and the tokens it adds."""
        new = replace(old, messages=(*old.messages, message), cued=False)
        return self._extend(new, old, self._rendered_with(new, old, prompt=False))

    def cue(self, old: Conversation) -> tuple[Conversation, list[int]]:
        """The conversation with the generation prompt; no tokens when it has one already."""
        if old.cued:
            return old, []
        return self._extend(replace(old, cued=True), old, self._render(old.messages, old, prompt=True))

    def seal(self, old: Conversation, text: str) -> tuple[Conversation, list[int]]:
        """The conversation with an assistant text that follows the cue, and what the template puts after it."""
        if not old.cued:
            raise TemplateError("seal closes an assistant text that was written after a cue; call cue() first")
        stand_in = self._render((*old.messages, {"role": "assistant", "content": STAND_IN}), old, prompt=False)
        if not stand_in.startswith(old.rendered + STAND_IN):
            raise TemplateError("the chat template rewrites what comes before an assistant text; seal cannot close it")
        messages = (*old.messages, {"role": "assistant", "content": text})
        tail = stand_in[len(old.rendered) + len(STAND_IN) :]
        return self._sealed(old, messages, self._render(messages, old, prompt=False), text, tail)

    def close(self, old: Conversation, text: str, message: Mapping[str, Any]) -> tuple[Conversation, list[int]]:
        """As `seal`, for a text that is `message`: it may have reasoning and calls, spelled as the model did."""
        messages = (*old.messages, message)
        rendered = self._render(messages, old, prompt=False)
        return self._sealed(old, messages, rendered, text, self._tail(old, text, rendered))

    def follow(
        self, old: Conversation, new: Conversation, tokens: Sequence[int], *, cue: bool = True
    ) -> tuple[Conversation, int, list[int]]:
        """`new` with the generation prompt (`cue`), how many of the context's `tokens` it keeps, and the ids to append.

        All are kept unless the template rewrites earlier messages (it drops their reasoning, or shows tools from now
        on). Then the tokens from the first difference on must be replaced, which is refused when the context holds
        anything but this conversation.
        """
        text = self._rendered_with(new, old, prompt=cue)
        if text.startswith(old.rendered):
            extended, ids = self._extend(replace(new, cued=cue), old, text)
            return extended, len(tokens), ids
        if self.tokenizer.decode(tokens) != old.transcript:
            raise TemplateError(REWRITES + "; this one holds more than its messages and cannot be rewritten")
        ids = self._encode(text)
        same = common(ids, tokens)
        return replace(new, rendered=text, cued=cue, transcript=_show(text, self._names)), same, ids[same:]

    def continued(self, new: Conversation) -> tuple[Conversation, list[int]]:
        """`new` cut after the text of its last message, which the model is to continue, and all its tokens."""
        rendered = self._render(new.messages, new, prompt=False)
        whole = _hide(new.messages[-1]["content"], self._hiding, self._names)
        at = rendered.rfind(whole.strip())
        if not whole.strip() or at < 0:
            raise TemplateError(
                "the chat template does not write the last message's text as it is, so it cannot be cut"
            )
        own = whole.lstrip() if rendered.startswith(whole.lstrip(), at) else whole.strip()  # it may trim texts
        text = rendered[: at + len(own)]
        return replace(new, rendered=text, cued=True, transcript=_show(text, self._names)), self._encode(text)

    def _sealed(
        self, old: Conversation, messages: tuple[Mapping[str, Any], ...], rendered: str, text: str, tail: str
    ) -> tuple[Conversation, list[int]]:
        transcript = old.transcript + text + _show(tail, self._names)
        return replace(old, messages=messages, cued=False, rendered=rendered, transcript=transcript), self._encode(tail)

    def _tail(self, old: Conversation, text: str, rendered: str) -> str:
        """What a rendering has after its last message: an end token and spaces, or all after the text itself."""
        ends = [rendered.rfind(self.tokenizer.token_text(id)) for id in self.tokenizer.eos_ids]
        tail = rendered[max(ends) :] if max(ends, default=-1) >= 0 else ""
        if any(tail.strip() == self.tokenizer.token_text(id) for id in self.tokenizer.eos_ids):
            return tail
        if not rendered.startswith(old.rendered + text):
            raise TemplateError("the chat template writes no end token after an assistant message; it cannot be closed")
        return rendered[len(old.rendered) + len(text) :]

    def _extend(self, new: Conversation, old: Conversation, text: str) -> tuple[Conversation, list[int]]:
        if not text.startswith(old.rendered):
            raise TemplateError(REWRITES)
        added = text[len(old.rendered) :]
        return replace(new, rendered=text, transcript=old.transcript + _show(added, self._names)), self._encode(added)

    def _rendered_with(self, new: Conversation, old: Conversation, *, prompt: bool) -> str:
        """The rendering of a conversation with more messages than the old one; an error names their roles."""
        try:
            return self._render(new.messages, new, prompt=prompt)
        except TemplateError as error:
            roles = dict.fromkeys(repr(message.get("role")) for message in new.messages[len(old.messages) :])
            if not roles:
                raise
            raise TemplateError(f"a message with the role {' or '.join(roles)} cannot be added: {error}") from error

    def _render(self, messages: Sequence[Mapping[str, Any]], old: Conversation, *, prompt: bool) -> str:
        if self.template is None:
            raise Unsupported("this model has no chat template; write the prompt with ctx.fill")
        if old.described and old.tools:
            messages = describe_tools(messages, old.tools)
        hidden = [_hide(m, self._hiding, self._names) for m in messages]
        tools = None if not old.tools or old.described else _hide(old.tools, self._hiding, self._names)
        variables = _hide(old.variables, self._hiding, self._names)
        return self.template.render(hidden, add_generation_prompt=prompt, tools=tools, **variables)

    def _encode(self, text: str) -> list[int]:
        """Ids of a rendering: special tokens from the template are special, those inside messages are plain text."""
        ids, at = [], 0
        for match in find_all(self._special, text, _longest(self._names)):
            ids += self._plain(text[at : match.start()])
            ids += self.tokenizer.encode(match.group(), special=True)
            at = match.end()
        return ids + self._plain(text[at:])

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(_show(text, self._names)) if text else []


def _hide(value: Any, hiding: re.Pattern[str], names: Sequence[str], depth: int = 0) -> Any:
    """Names of special tokens inside a message's strings, replaced by stand-ins that no template writes.

    A stand-in's own character inside a message gets an escape in front of it.
    """
    if depth > MAX_DEPTH:
        raise TemplateError(f"a message, tool or variable is nested deeper than {MAX_DEPTH} levels")
    quote = chr(PRIVATE + len(names))
    match value:
        case str():
            return replace_all(
                hiding,
                lambda m: chr(PRIVATE + names.index(m.group())) if m.group() in names else quote + m.group(),
                value,
                _longest(names),
            )
        case Mapping():
            return {k: _hide(v, hiding, names, depth + 1) for k, v in value.items()}
        case list() | tuple():
            return [_hide(v, hiding, names, depth + 1) for v in value]
    return value


def _show(text: str, names: Sequence[str]) -> str:
    """The text with the stand-ins replaced again."""
    quote = chr(PRIVATE + len(names))
    return replace_all(
        re.compile(f"{quote}[{chr(PRIVATE)}-{quote}]|[{chr(PRIVATE)}-{quote}]"),
        lambda m: m.group()[1:] or (names[ord(m.group()) - PRIVATE] if m.group() != quote else quote),
        text,
        2,
    )


def _longest(names: Sequence[str]) -> int:
    return max(map(len, names), default=1)
