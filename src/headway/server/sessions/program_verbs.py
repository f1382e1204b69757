"""The verbs of a program's session: what it prints, its messages, and those of its key's other programs by topic."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from headway.base.errors import InvalidInput, Unsupported
from headway.base.text import short_repr
from headway.remote.protocol.codec import BadMessage
from headway.sandbox.limits import json_text
from headway.server.sessions.verbs import verb

if TYPE_CHECKING:
    from headway.server.programs.run import Run
    from headway.server.sessions.session import Session

TOPIC = 256  # characters of a topic at most


def _run(session: Session) -> Run:
    if session.program is None:
        raise Unsupported("this session is not that of a program that runs beside the engine")
    return session.program


def _topic(topic: Any) -> str:
    if not isinstance(topic, str) or not 0 < len(topic) <= TOPIC:
        raise InvalidInput(f"the topic is {short_repr(topic)}; it must be text of 1 to {TOPIC} characters")
    return topic


@verb
async def program_print(session: Session, text: str) -> None:
    if not isinstance(text, str):
        raise BadMessage("what is printed must be text")
    await _run(session).output.add("print", text=text)


@verb
async def program_send(session: Session, value: Any) -> None:
    await _run(session).output.add("message", json_text(value))


@verb
def program_flush(session: Session) -> None:
    _run(session)


@verb
def program_receive(session: Session) -> Awaitable[Any]:
    return _run(session).inbox.get()


@verb
def program_subscribe(session: Session, topic: str) -> None:
    _run(session).subscribe(_topic(topic))


@verb
def program_unsubscribe(session: Session, topic: str) -> None:
    _run(session).unsubscribe(_topic(topic))


@verb
def program_next(session: Session, topic: str) -> Awaitable[Any]:
    queue = _run(session).topics.get(_topic(topic))
    if queue is None:
        raise InvalidInput(f"this program does not subscribe to the topic {short_repr(topic)}")
    return queue.get()


@verb
def program_publish(session: Session, topic: str, value: Any) -> Awaitable[int]:
    return _run(session).publish(_topic(topic), value)
