"""A connection without threads or sockets: two functions, `send` and `recv`, are all that a sandboxed program has.

The messages are those of every other connection. A frame crosses as text, one character for each byte, because
WebAssembly's hosts pass text in one piece and lists byte by byte. Whoever waits fetches messages himself: a synchronous
verb in place, everything else in the event loop, whose select is `recv`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from headway.base.errors import Closed, ConnectionFailed, HeadwayError
from headway.remote.connection.mailbox import Mailbox
from headway.remote.connection.threaded import Connection
from headway.remote.program import ProgramEngine
from headway.remote.protocol.codec import decode, encode

Send = Callable[[str], None]
Receive = Callable[[int], str | None]  # within so many milliseconds; -1: for ever
POLLS = 64  # messages that are taken before the program runs again


class GuestConnection(Connection):
    """The session of a sandboxed program."""

    def __init__(self, send: Send, receive: Receive, route: Callable[[dict[str, Any]], None]) -> None:
        self._send, self._receive = send, receive
        self._unsent: deque[bytes] = deque()
        self._transmitting = False
        super().__init__("program:", None, 0.0, route)

    def _start(self) -> None:
        self._transmit(encode(self._hello()))
        answer = self._receive(-1)
        assert answer is not None
        self._welcomed(decode(answer.encode("latin-1")))

    def new_mailbox(self) -> Mailbox:
        return Mailbox(lambda: _Fetching(self))

    def _number(self, message: dict[str, Any]) -> None:
        super()._number(message)
        self._unsent.append(self._unacked[-1][1])

    def _wake(self) -> None:
        """Send what there is. A finalizer may come in between: it leaves it to whoever sends."""
        if self._transmitting:
            return
        self._transmitting = True
        try:
            while self._unsent:
                self._transmit(self._unsent.popleft())
        finally:
            self._transmitting = False

    def _transmit(self, frame: bytes) -> None:
        self._send(frame.decode("latin-1"))

    def fetch(self, milliseconds: int) -> bool:
        """Take a message of the server, if one comes in time."""
        with self._sending:
            self._flush_later()
        self._wake()
        text = self._receive(milliseconds)
        if text is None:
            return False
        try:
            if self._take(decode(text.encode("latin-1"))):
                self._transmit(self._ack())
        except HeadwayError as error:
            self._lose(error if isinstance(error, ConnectionFailed) else ConnectionFailed(str(error)))
        return True

    def close(self) -> None:
        if self.lost is None:
            with suppress(HeadwayError):
                self._post({"type": "bye"})
            self._lose(Closed("this engine's connection was closed"))


class _Fetching(threading.Event):
    """Waiting for it fetches messages."""

    def __init__(self, connection: GuestConnection) -> None:
        super().__init__()
        self._connection = connection

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._connection.fetch(-1 if left is None else _milliseconds(left))
        return True


class GuestLoop(asyncio.BaseEventLoop):
    """An event loop whose select is `recv`; it has timers, tasks and futures, and no sockets or processes."""

    def __init__(self) -> None:
        super().__init__()
        self.connection: GuestConnection | None = None
        self._selector = self  # type: ignore[assignment]

    def select(self, timeout: float | None = None) -> list[Any]:
        """What `BaseEventLoop` asks between two rounds: messages go to their mailboxes, which wake whoever waits."""
        assert self.connection is not None
        wait = -1 if timeout is None else _milliseconds(timeout)
        for _ in range(POLLS):
            if not self.connection.fetch(wait):
                break
            wait = 0
        return []

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...


class GuestEngine(ProgramEngine):
    """The engine beside a sandbox, for the program in it."""

    def __init__(self, send: Send, receive: Receive, loop: GuestLoop) -> None:
        self._send, self._receive = send, receive
        super().__init__()
        loop.connection = cast("GuestConnection", self._connection)

    def _connect(self, api_key: str | None, timeout: float) -> Connection:
        return GuestConnection(self._send, self._receive, self._route)


def _milliseconds(seconds: float) -> int:
    return max(0, int(seconds * 1000 + 0.999))
