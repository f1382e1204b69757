"""Messages in a context: append them through the template, close a reply, or restore the context as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import Closed, ContextBusy, InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.program.chat.conversation import Conversation
from headway.program.chat.reader import ReplyReader
from headway.program.checks.ids import common
from headway.text.replies import FORMATS, detect_format
from headway.text.templates.messages import assistant_message

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.text.templates.chat_template import ChatTemplate

Messages = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Checkpoint:
    """The tokens and conversation of a context, to go back to."""

    tokens: tuple[int, ...]
    computed: int
    conversation: Conversation
    written: int

    @classmethod
    def of(cls, context: Context) -> Checkpoint:
        with context._changing():
            return cls(context.tokens, context.seq_len, context._conversation, context._written)

    def restore(self, context: Context) -> None:
        """Set the context back; one that is released or busy is left alone."""
        with suppress(Closed, ContextBusy), context._changing():
            keep = min(common(self.tokens, context.tokens), self.computed)
            _rewrite(context, keep, self.tokens[keep:], self.conversation, self.written)


def append_messages(
    context: Context,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    described: bool = False,
) -> str:
    """Append messages and the generation prompt; returns the chat as the template renders it.

    A text after the last prompt is closed first. `tools` are shown to the model from now on; None leaves those that
    were shown. Unlike the verbs, this works with a template that rewrites earlier messages.
    """
    new_messages = as_messages(messages)
    with context._changing():
        shown = context._conversation.tools or ()
        if not new_messages and not context.messages:
            raise InvalidInput("there is no message to reply to; give chat a text, or call ctx.user first")
        if not new_messages and context._conversation.cued and (tools is None or tuple(tools) == shown):
            return context._conversation.rendered  # the reply continues after the prompt and what follows it
        if context._conversation.cued and len(context.tokens) > context._written:
            context.seal()
        conversation, chat = context._conversation, context.engine.chat_writer
        new = replace(conversation, messages=(*conversation.messages, *new_messages))
        if tools is not None:
            new = replace(new, tools=tuple(tools) or None, described=described and bool(tools))
        new, keep, ids = chat.follow(conversation, new, context.tokens)
        _rewrite(context, keep, ids, new)
        return new.rendered


def close_message(context: Context, reader: ReplyReader) -> list[str]:
    """Make what was read a message of the conversation, and append what the template puts after it.

    Returns the ids of its calls. A call without an id gets one of nine letters and digits, as some templates require.
    """
    with context._changing():
        reply = reader.reply
        earlier = sum(len(message.get("tool_calls") or ()) for message in context.messages)
        ids = [call.id or f"call{(earlier + i) % 100_000:05d}" for i, call in enumerate(reply.calls)]
        message = assistant_message(reply, ids)
        # Not reader.text: a token that holds the beginning of a stop was read in part, and is no longer in the context.
        tokenizer, tokens = context.engine.tokenizer, context.tokens[context._written :]
        text = tokenizer.decode(token for token in tokens if token < tokenizer.vocab_size)
        conversation, tail = context.engine.chat_writer.close(context._conversation, text, message)
        _rewrite(context, len(context.tokens), tail, conversation)
        return ids


def as_messages(messages: Messages) -> tuple[Mapping[str, Any], ...]:
    """A user's text, one message or several."""
    match messages:
        case None:
            return ()
        case str():
            return ({"role": "user", "content": messages},)
        case Mapping():
            return (dict(messages),)
        case list() | tuple() if all(isinstance(message, Mapping) for message in messages):
            return tuple(dict(message) for message in messages)
    raise WrongType(
        f"chat was given {short_repr(messages)}; give a text, a message as a dict with a role, or a list of these"
    )


def reply_format(template: ChatTemplate | None, requested: str | None = None) -> str | None:
    """The format of a model's replies without tools; None when they are content alone, or in an unknown format."""
    return _checked(requested) or detect_format(_source(template, with_tools=False))


def tool_format(template: ChatTemplate | None, requested: str | None = None) -> tuple[str, bool]:
    """The format of tool calls, and whether tools must be described in the system message."""
    source = _source(template, with_tools=True)
    format = _checked(requested) or detect_format(source)
    if "tools" in source and format is not None:
        return format, False
    if requested == "hermes":
        return requested, True
    raise Unsupported(
        "the chat template of this model has no place for tools, or writes calls in an unknown format; "
        "tool_format='hermes' describes them in the system message, which a model that was not trained for it "
        "may not understand"
    )


def _checked(requested: str | None) -> str | None:
    if requested is not None and requested not in FORMATS:
        raise InvalidInput(f"tool_format is {short_repr(requested)}; it must be one of {', '.join(FORMATS)}")
    return requested


def _source(template: ChatTemplate | None, *, with_tools: bool) -> str:
    if template is None:
        raise Unsupported("this model has no chat template; write the prompt with ctx.fill and use ctx.generate")
    return template.tool_source if with_tools and template.tool_source is not None else template.source


def _rewrite(
    context: Context, keep: int, ids: Sequence[int], conversation: Conversation, written: int | None = None
) -> None:
    """Keep the first tokens of a context, append ids to the pending ones, and set its conversation."""
    context.truncate(len(context.tokens) - keep)
    pending = [*context.pending, *ids]
    context._restore(pending, conversation, context.seq_len + len(pending) if written is None else written)
