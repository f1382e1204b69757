"""Clients that stop in the middle, do not read, or flood: each loses its connection in time, and nothing stays."""

from __future__ import annotations

import gc
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.testing import random_model
from support.live import PATIENCE, Live, live
from support.plain_client import PlainSession, UnixFrames, WebSocketFrames, from_frame, to_frame

HELLO = {"type": "hello", "version": 1}
CONTEXT = {"seed": None, "priority": 0, "salt": "", "token_budget": None, "deadline": None}
FLUSH = {"attention_mask": None, "adapter": None}
SHORT = {"header_timeout": 2.0, "body_timeout": 2.0, "write_timeout": 0.5, "session_grace": 0.5}
WAYS = ("unix", "websocket")
TRANSPORTS = pytest.mark.parametrize("transport", WAYS)


@contextmanager
def serving(**settings: Any) -> Iterator[Live]:
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        path = Path(folder) / "socket"
        with live(hw.Engine(random_model(), pages=64, threads=1), session_socket=path, **settings) as server:
            server.socket = str(path)  # type: ignore[attr-defined]
            yield server
            server.until(server.is_quiet)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Live]:
    with serving(**SHORT) as server:
        yield server


@pytest.fixture(scope="module")
def patient() -> Iterator[Live]:
    """Its limits are those of every server."""
    with serving(max_connections=8) as server:
        yield server


def frames(server: Live, transport: str) -> UnixFrames:
    opened = (
        UnixFrames(server.socket)  # type: ignore[attr-defined]
        if transport == "unix"
        else WebSocketFrames("127.0.0.1", server.port)
    )
    opened._socket.settimeout(PATIENCE)
    return opened


def closing(connection: UnixFrames, *, answers: bool = False) -> str:
    """The reason that is given; then the connection ends, whether the client answers a WebSocket's close or not."""
    message = from_frame(connection.receive())
    while message["type"] != "close":
        message = from_frame(connection.receive())
    if answers and isinstance(connection, WebSocketFrames):
        with pytest.raises(EOFError):
            connection.receive()
        connection.send((1000).to_bytes(2, "big"), 8)
    with suppress(ConnectionError):
        while connection._socket.recv(1 << 16):
            pass
    return message["reason"]


# --- what began and does not go on


GARBAGE = [b"", b"\x81", b"\x82\xff", b"\x82\xfe\x01\x00", b"abc", b"\x32" + bytes(7) + b"{}", b"\x89\x80\0\0\0\0"]
ODD_FRAMES = (b"abc", b"\x32" + bytes(7) + b"{}")  # not those of a WebSocket


def test_what_does_not_become_a_first_message_is_closed(impatient: Live) -> None:
    """At once where it cannot, and after header_timeout where it still could."""
    opened = [(frames(impatient, transport), transport, begun) for transport in WAYS for begun in GARBAGE]
    for connection, _, begun in opened:
        connection._socket.sendall(begun)
    for connection, transport, begun in opened:
        if transport == "websocket" and begun in ODD_FRAMES:
            with pytest.raises(EOFError):
                connection.receive()
        else:
            assert closing(connection) == "hello", (transport, begun)
        assert is_over(connection)
        connection.cut()


def is_over(connection: UnixFrames) -> bool:
    with suppress(ConnectionError):
        return connection._socket.recv(1) == b""
    return True


def test_a_message_that_is_not_sent_to_its_end_closes_the_session(impatient: Live) -> None:
    opened = [frames(impatient, "unix") for _ in range(4)]
    for connection in opened:
        connection.send(to_frame(HELLO))
        assert from_frame(connection.receive())["type"] == "welcome"
    for connection, begun in zip(opened, (b"\x05", bytes(7), b"\x32" + bytes(7), b"\x32" + bytes(7) + b"{}")):
        connection._socket.sendall(begun)
    for connection in opened:
        assert closing(connection) == "malformed"
        connection.cut()


# --- who does not read


def unread(server: Live, transport: str) -> UnixFrames:
    """A client with a page that asks for more than sockets hold, and reads none of it."""
    connection = frames(server, transport)
    connection.send(to_frame(HELLO))
    assert from_frame(connection.receive())["type"] == "welcome"
    requests: list[tuple[str, dict[str, Any]]] = [
        ("context.new", {"context": 1, **CONTEXT}),
        ("context.fill", {"context": 1, "text": [1, 2, 3], "special": False}),
        ("context.flush", {"context": 1, "number": 2, **FLUSH}),
        ("context.new", {"context": 3, **CONTEXT}),
        ("context.fill", {"context": 3, "text": [7] * 40_000, "special": False}),
        *[("context.tokens", {"context": 3})] * 200,
    ]
    for n, (verb, args) in enumerate(requests, 1):
        connection.send(to_frame({"type": "request", "n": n, "ack": 0, "id": n, "verb": verb, "args": args}))
    return connection


def web_sockets() -> list[Any]:
    """The WebSockets that servers of this process have open."""
    found = [each for each in gc.get_objects() if type(each).__name__ == "WebSocketConnection"]
    return [each for each in found if not each.disconnected]


def is_ended(connection: UnixFrames) -> bool:
    """Whether the server has ended a connection whose client has not read what it sent."""
    if isinstance(connection, WebSocketFrames):
        return not web_sockets()
    poll = select.poll()
    poll.register(connection._socket, 0)
    return any(state & select.POLLHUP for _, state in poll.poll(0))


@TRANSPORTS
def test_a_client_that_does_not_read_loses_its_connection_and_its_session(impatient: Live, transport: str) -> None:
    connection = unread(impatient, transport)
    impatient.until(lambda: is_ended(connection))
    impatient.until(impatient.is_quiet)
    connection.cut()


@TRANSPORTS
def test_a_session_that_is_closed_while_its_client_does_not_read_ends_too(transport: str) -> None:
    with serving(**SHORT, max_session_bytes=1 << 20) as server:
        connection = unread(server, transport)  # more than max_session_bytes
        server.until(lambda: is_ended(connection))
        server.until(server.is_quiet)
        connection.cut()


@TRANSPORTS
def test_a_client_comes_back_at_once_while_its_last_connection_is_full(patient: Live, transport: str) -> None:
    """Nothing waits for a connection that the client has given up, and nothing that it sent there is read twice."""
    old = frames(patient, transport)
    old.send(to_frame(HELLO))
    session = from_frame(old.receive())["session"]
    requests = [("context.new", {"context": 1, **CONTEXT})]
    requests += [("context.fill", {"context": 1, "text": [7] * 40_000, "special": False})]
    requests += [("context.tokens", {"context": 1})] * 200
    messages: list[dict[str, Any]] = [
        {"type": "request", "n": n, "ack": 0, "id": n, "verb": verb, "args": args}
        for n, (verb, args) in enumerate(requests, 1)
    ]
    for message in messages:
        old.send(to_frame(message))
    new = frames(patient, transport)
    new.send(to_frame({**HELLO, "resume": {"session": session, "received": 0}}))
    welcome = from_frame(new.receive())
    assert welcome["session"] == session
    for message in messages[welcome["received"] :]:
        new.send(to_frame(message))
    replies = []
    while len(replies) < len(messages):
        message = from_frame(new.receive())
        assert message["type"] in ("reply", "ack"), message
        if message["type"] == "reply":
            replies.append(message["id"])
            new.send(to_frame({"type": "ack", "ack": message["n"]}))
    assert replies == [*range(1, len(messages) + 1)]
    new.send(to_frame({"type": "bye", "n": len(messages) + 1, "ack": len(messages)}))
    assert closing(new, answers=True) == "bye"
    for connection in (old, new):
        connection.cut()


def test_messages_that_waited_when_their_connection_was_given_up_are_handled_once(patient: Live) -> None:
    """They were counted as received, so the client does not send them again."""
    open: Callable[[], UnixFrames] = lambda: frames(patient, "unix")  # noqa: E731
    session = PlainSession(open)
    context = session.new()
    session.ask("context.new", context=context, **CONTEXT)
    with patient.engine._lock:  # a verb waits for it, and all that follow wait for that one
        ids = [session.request("context.fill", context=context, text=[1], special=False) for _ in range(200)]
        time.sleep(0.2)  # as many are read now as may wait, on any but the slowest of machines
        session.come_back()
    for id in ids:
        session.value(id)
    assert session.ask("context.tokens", context=context) == [1] * 200
    assert session.bye() == "bye"


def test_a_flood_of_pings_that_nobody_reads_the_answers_to_takes_no_memory(patient: Live) -> None:
    connection = frames(patient, "websocket")
    connection.send(to_frame(HELLO))
    assert from_frame(connection.receive())["type"] == "welcome"
    ping = b"\x89\xfd" + bytes(4) + bytes(125)
    connection._socket.settimeout(5.0)
    with suppress(TimeoutError, ConnectionError):  # the server may stop reading
        for _ in range(256):
            connection._socket.sendall(ping * 1000)  # 33 MB in all
    (served,) = web_sockets()
    assert served.transport.get_write_buffer_size() < 1 << 20
    connection.cut()
    patient.until(lambda: served.disconnected)


def test_a_message_may_come_in_pieces_of_any_size(patient: Live) -> None:
    connection = frames(patient, "websocket")
    hello = to_frame({**HELLO, "ignored": "x" * 300})
    pieces = [b"", *(hello[i : i + 1] for i in range(len(hello))), b""]
    for i, piece in enumerate(pieces):
        head = bytes([(2 if i == 0 else 0) | (0x80 if i == len(pieces) - 1 else 0), 0x80 | len(piece)])
        connection._socket.sendall(head + bytes(4) + piece)
    assert from_frame(connection.receive())["type"] == "welcome"
    connection.send(to_frame({"type": "bye", "n": 1, "ack": 0}))
    assert closing(connection, answers=True) == "bye"


def test_there_are_at_most_so_many_connections_on_the_socket(patient: Live) -> None:
    held = [frames(patient, "unix") for _ in range(8)]
    for connection in held:
        connection.send(to_frame(HELLO))
        assert from_frame(connection.receive())["type"] == "welcome"
    assert closing(frames(patient, "unix")) == "busy"
    for connection in held:
        connection.send(to_frame({"type": "bye", "n": 1, "ack": 0}))
        assert closing(connection) == "bye"
        connection._socket.shutdown(socket.SHUT_RDWR)
        connection.cut()
    patient.until(lambda: opened(patient))


def opened(server: Live) -> bool:
    connection = frames(server, "unix")
    connection.send(to_frame(HELLO))
    try:
        return from_frame(connection.receive())["type"] == "welcome"
    finally:
        connection.cut()
