"""The verbs of chat replies: the server writes the messages, the client's program runs the tools. See `verbs.py`."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headway.base.errors import HeadwayError, InvalidInput
from headway.base.text import short_repr
from headway.program.adapters import mix_of
from headway.program.chat.limits import ChatLimits
from headway.program.chat.reply import ChatReply
from headway.program.chat.tools import ToolOutcome, ToolResult, ToolSet
from headway.remote.protocol.codec import BadMessage
from headway.remote.protocol.values import sampler_of
from headway.server.sessions.callables import Caller
from headway.server.sessions.passes import adapter_argument
from headway.server.sessions.verbs import verb
from headway.text.replies.parts import ToolCall

if TYPE_CHECKING:
    from headway.server.sessions.session import Session


class ToolError(HeadwayError):
    """What a tool of the client raised; the client has the exception itself, under this number."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class ClientTools(ToolSet):
    """Tools of the client: `[schema, whether it has a function for it]`."""

    def __init__(self, caller: Caller, given: Any) -> None:
        match given:
            case [*pairs] if all(isinstance(one, list) and len(one) == 2 and type(one[1]) is bool for one in pairs):
                super().__init__([schema for schema, _ in pairs])
            case _:
                raise BadMessage(f"{short_repr(given)} is not a list of tools; see docs/protocol.md")
        self._runs = {name for name, (_, runs) in zip(self.names, given, strict=True) if runs}
        self._caller, self._calls = caller, 0

    def can_run(self, calls: Any) -> bool:
        return all(call.name in self._runs or call.name not in self.names for call in calls)

    async def run(self, call: ToolCall, timeout: float | None) -> ToolOutcome:
        """Have the client make the call; it minds the time."""
        self._calls += 1
        match await self._caller.ask(0, "tool", self._calls, call.name, call.arguments):
            case [str(text), bool(failed), bool(misused)]:
                return ToolOutcome(text, ToolError(self._calls, text) if failed else None, misused)
            case other:
                raise BadMessage(f"{short_repr(other)} is not the outcome of a tool; see docs/protocol.md")


@verb
def chat_new(
    session: Session,
    *,
    context: int,
    chat: int,
    messages: Any,
    sampler: Any,
    tools: Any,
    tool_choice: Any,
    tool_format: Any,
    on_error: Any,
    stop: Any,
    max_tokens: Any,
    max_rounds: Any,
    adapter: Any,
) -> dict[str, Any]:
    own = session.context(context)
    if not isinstance(chat, int) or chat in session.chats:
        raise BadMessage(f"{short_repr(chat)} is not a new number of a chat")
    if len(session.chats) >= session.serving.settings.max_contexts:
        raise InvalidInput(f"this session has {len(session.chats)} chats; let go of some")
    if not isinstance(stop, list):
        raise BadMessage(f"{short_repr(stop)} is not a list of stops")
    mix = mix_of(session.engine, adapter_argument(session.adapters, adapter))
    reply = session.chats[chat] = ChatReply(
        own,
        messages,
        None if sampler is None else sampler_of(sampler),
        tools=None if tools is None else ClientTools(session.caller, tools),
        tool_choice=tool_choice,
        tool_format=tool_format,
        on_error=on_error,
        stop=stop,
        limits=ChatLimits(max_tokens, max_rounds, None, None),
        adapter=mix,
    )
    return _state(reply)


@verb
def chat_next(session: Session, chat: int) -> Awaitable[dict[str, Any]]:
    reply = _chat(session, chat)

    async def found() -> dict[str, Any]:
        with session.serving.queue_slot(session.tenant):
            part = await anext(reply, None)
        return _state(reply, [] if part is None else [part])

    return found()


@verb
def chat_text(session: Session, chat: int) -> Awaitable[dict[str, Any]]:
    reply = _chat(session, chat)

    async def found() -> dict[str, Any]:
        with session.serving.queue_slot(session.tenant):
            await reply.text()
        return _state(reply)

    return found()


@verb
def chat_state(session: Session, chat: int) -> dict[str, str]:
    reply = _chat(session, chat)
    return {"content": reply.content, "reasoning": reply.reasoning}


@verb
def chat_drop(session: Session, chat: int) -> None:
    if isinstance(chat, int):
        session.chats.pop(chat, None)


def _chat(session: Session, number: Any) -> ChatReply:
    chat = session.chats.get(number) if isinstance(number, int) else None
    if chat is None:
        raise InvalidInput(f"this session has no chat {short_repr(number)}")
    session.settle_passes(chat.context)
    return chat


def _state(reply: ChatReply, parts: list[Any] | tuple[()] = ()) -> dict[str, Any]:
    """What its attributes say, and the parts that came."""
    return {
        "parts": [_result_json(part) | _kind(part) for part in parts],
        "finish": reply.finish,
        "rounds": reply.rounds,
        "calls": [_result_json(call) for call in reply.calls],
        "bad": [asdict(bad) for bad in reply.bad],
    }


def _kind(part: Any) -> dict[str, str]:
    return {"kind": type(part).__name__}


def _result_json(part: Any) -> dict[str, Any]:
    if not isinstance(part, ToolResult):
        return asdict(part)
    failed = part.error.number if isinstance(part.error, ToolError) else None
    return {"call": asdict(part.call), "text": part.text, "failed": failed}
