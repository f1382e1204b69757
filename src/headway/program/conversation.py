"""A context's chat: its messages, what the template made of them, and the tokens each new verb adds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway.base.errors import TemplateError, Unsupported
from headway.text.chat import ChatTemplate
from headway.text.tokenizer import Tokenizer

STAND_IN = "headway"  # an assistant text, for finding what the template puts behind one
PRIVATE = 0xF0000  # code points that no text uses, for hiding names of special tokens inside messages


@dataclass(frozen=True)
class Conversation:
    """The messages so far and their rendering; `cued` when it ends with the generation prompt."""

    messages: tuple[Mapping[str, Any], ...] = ()
    rendered: str = ""
    cued: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = field(default=None)


class Chat:
    """Turns chat verbs into tokens through a model's own template."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        self.template, self.tokenizer = template, tokenizer
        names = sorted((tokenizer.token_text(i) for i in tokenizer.special_ids), key=len, reverse=True)
        self._names = [n for n in names if n]
        self._special = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")

    def add(self, talk: Conversation, message: Mapping[str, Any]) -> tuple[Conversation, list[int]]:
        """The conversation with one more message, and the tokens it adds."""
        return self._extend(replace(talk, messages=(*talk.messages, message), cued=False), talk, prompt=False)

    def cue(self, talk: Conversation) -> tuple[Conversation, list[int]]:
        """The generation prompt; nothing when it stands there already."""
        return (talk, []) if talk.cued else self._extend(replace(talk, cued=True), talk, prompt=True)

    def seal(self, talk: Conversation, text: str) -> tuple[Conversation, list[int]]:
        """What the template puts after an assistant text that stands behind the cue already."""
        if not talk.cued:
            raise TemplateError("seal closes an assistant text that was written behind a cue; call cue() first")
        stand_in = self._render((*talk.messages, {"role": "assistant", "content": STAND_IN}), talk, prompt=False)
        if not stand_in.startswith(talk.rendered + STAND_IN):
            raise TemplateError("the chat template rewrites what stands before an assistant text; seal cannot close it")
        messages = (*talk.messages, {"role": "assistant", "content": text})
        sealed = replace(talk, messages=messages, cued=False, rendered=self._render(messages, talk, prompt=False))
        return sealed, self._encode(stand_in[len(talk.rendered) + len(STAND_IN) :])

    def _extend(self, new: Conversation, old: Conversation, *, prompt: bool) -> tuple[Conversation, list[int]]:
        text = self._render(new.messages, new, prompt=prompt)
        if not text.startswith(old.rendered):
            raise TemplateError(
                "the chat template rewrites earlier messages when this one is added, so it cannot be appended; "
                "start a new context with all messages"
            )
        return replace(new, rendered=text), self._encode(text[len(old.rendered) :])

    def _render(self, messages: Sequence[Mapping[str, Any]], talk: Conversation, *, prompt: bool) -> str:
        if self.template is None:
            raise Unsupported("this model has no chat template; write the prompt with ctx.fill")
        hidden = [_hide(m, self._special, self._names) for m in messages]
        tools = None if talk.tools is None else [dict(t) for t in talk.tools]
        return self.template.render(hidden, add_generation_prompt=prompt, tools=tools)

    def _encode(self, text: str) -> list[int]:
        """Ids of a rendering: special tokens that the template wrote are special, those in messages are plain text."""
        ids, at = [], 0
        for match in self._special.finditer(text):
            ids += self._plain(text[at : match.start()])
            ids += self.tokenizer.encode(match.group(), special=True)
            at = match.end()
        return ids + self._plain(text[at:])

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(_show(text, self._names)) if text else []


def _hide(value: Any, special: re.Pattern[str], names: Sequence[str]) -> Any:
    """Names of special tokens inside a message's strings, replaced by stand-ins that no template writes."""
    match value:
        case str():
            return special.sub(lambda m: chr(PRIVATE + names.index(m.group())), value)
        case Mapping():
            return {k: _hide(v, special, names) for k, v in value.items()}
        case list() | tuple():
            return [_hide(v, special, names) for v in value]
    return value


def _show(text: str, names: Sequence[str]) -> str:
    """The text with the stand-ins turned back."""
    return "".join(names[ord(c) - PRIVATE] if 0 <= ord(c) - PRIVATE < len(names) else c for c in text)
