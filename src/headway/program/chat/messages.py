"""Turns of a chat on a context: messages written through the template, a reply closed, and all of it taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import Closed, ContextBusy, InvalidInput, Unsupported, WrongType
from headway.program.chat.conversation import Conversation
from headway.program.chat.reader import Reader
from headway.program.ids import common
from headway.text.replies import FORMATS, detect
from headway.text.templates.messages import assistant_message

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.text.templates.chat_template import ChatTemplate

Messages = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Before:
    """A context as it was, to go back to."""

    tokens: tuple[int, ...]
    computed: int
    talk: Conversation
    written: int

    @classmethod
    def of(cls, context: Context) -> Before:
        with context.changing():
            return cls(context.tokens, context.seq_len, context.talk, context.written)

    def restore(self, context: Context) -> None:
        """Have the context as it was; one that is released or busy elsewhere is left alone."""
        with suppress(Closed, ContextBusy), context.changing():
            keep = min(common(self.tokens, context.tokens), self.computed)
            _rewrite(context, keep, self.tokens[keep:], self.talk, self.written)


def append_messages(
    context: Context,
    said: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    described: bool = False,
) -> None:
    """Append messages and the generation prompt.

    A text that stands behind the last prompt is closed first. `tools` are shown to the model from now on; None leaves
    those that were shown. Unlike the verbs this follows a template that rewrites what stands before.
    """
    messages = as_messages(said)
    with context.changing():
        shown = context.talk.tools or ()
        if not messages and not context.messages:
            raise InvalidInput("nothing was said to the model; give chat a text, or call ctx.user first")
        if not messages and context.talk.cued and (tools is None or tuple(tools) == shown):
            return  # the reply goes on behind the prompt, and behind what stands there
        if context.talk.cued and len(context.tokens) > context.written:
            context.seal()
        talk, chat = context.talk, context.engine.chat
        new = replace(talk, messages=(*talk.messages, *messages))
        if tools is not None:
            new = replace(new, tools=tuple(tools) or None, described=described and bool(tools))
        new, keep, ids = chat.follow(talk, new, context.tokens)
        _rewrite(context, keep, ids, new)


def close_message(context: Context, reader: Reader) -> list[str]:
    """Make what was read a message of the conversation, and append what the template puts behind it.

    The ids of its calls; those that the model wrote none for have nine letters and digits, as some templates want.
    """
    with context.changing():
        reply = reader.reply
        made = sum(len(message.get("tool_calls") or ()) for message in context.messages)
        ids = [call.id or f"call{(made + i) % 100_000:05d}" for i, call in enumerate(reply.calls)]
        message = assistant_message(reply, ids)
        # Not reader.text: of a token that holds the beginning of a stop the rest was read, and the token has left.
        tokenizer, tokens = context.engine.tokenizer, context.tokens[context.written :]
        text = tokenizer.decode(token for token in tokens if token < tokenizer.vocab_size)
        talk, tail = context.engine.chat.close(context.talk, text, message)
        _rewrite(context, len(context.tokens), tail, talk)
        return ids


def as_messages(said: Messages) -> tuple[Mapping[str, Any], ...]:
    """A user's text, one message or several."""
    match said:
        case None:
            return ()
        case str():
            return ({"role": "user", "content": said},)
        case Mapping():
            return (dict(said),)
        case list() | tuple() if all(isinstance(message, Mapping) for message in said):
            return tuple(dict(message) for message in said)
    raise WrongType(
        f"chat was given {said!r:.80}; it takes a text, a message as a dict with a role, or a list of these"
    )


def reply_format(template: ChatTemplate | None, asked: str | None = None) -> str | None:
    """The format of a model's replies when it has no tools; None when they are content alone, or in an unknown form."""
    return _checked(asked) or detect(_source(template, with_tools=False))


def tool_format(template: ChatTemplate | None, asked: str | None = None) -> tuple[str, bool]:
    """The format for calls of tools, and whether tools must be described in the system message."""
    source = _source(template, with_tools=True)
    found = _checked(asked) or detect(source)
    if "tools" in source and found is not None:
        return found, False
    if asked == "hermes":
        return asked, True
    raise Unsupported(
        "the chat template of this model has no place for tools, or calls in a form that is not known; "
        "tool_format='hermes' describes them in the system message, which a model that was not trained for it "
        "may not understand"
    )


def _checked(asked: str | None) -> str | None:
    if asked is not None and asked not in FORMATS:
        raise InvalidInput(f"tool_format is {asked!r:.80}; it takes one of {', '.join(FORMATS)}")
    return asked


def _source(template: ChatTemplate | None, *, with_tools: bool) -> str:
    if template is None:
        raise Unsupported("this model has no chat template; write the prompt with ctx.fill and use ctx.generate")
    return template.tool_source if with_tools and template.tool_source is not None else template.source


def _rewrite(context: Context, keep: int, ids: Sequence[int], talk: Conversation, written: int | None = None) -> None:
    """Keep the first tokens of a context, append others to its pending ones, and have it hold a conversation."""
    context.truncate(len(context.tokens) - keep)
    pending = [*context.pending, *ids]
    context.resume(pending, talk, context.seq_len + len(pending) if written is None else written)
