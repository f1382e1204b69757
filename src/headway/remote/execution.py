"""A pass that was sent: waiting for its reply, in an event loop or a thread, and undoing it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from headway.base.checks import check_timeout
from headway.base.errors import Closed, ConnectionFailed, DeadlineExceeded, Unsupported
from headway.program.output import Output
from headway.remote.connection.mailbox import Mailbox
from headway.remote.connection.threaded import Connection, Lost

if TYPE_CHECKING:
    from headway.remote.forward import RemoteForward


class Submitted:
    """A pass that was sent, and its reply. It knows neither its builder nor its context, which may be lost."""

    def __init__(self, connection: Connection, number: int, request: int, mailbox: Mailbox) -> None:
        self._connection, self.number, self._request, self.mailbox = connection, number, request, mailbox
        self.reply: Any = None
        self.cancelled = self.is_taken = self.is_undone = False
        self.fed: list[Submitted] = []  # passes that its tokens were fed to
        self._lock = threading.Lock()

    def note(self, message: Any) -> None:
        """The reply has come."""
        with self._lock:
            self.reply = self.reply or message
        self.mailbox.put(message)  # for others who wait

    async def wait(self) -> None:
        """Wait for the reply; whoever is cancelled meanwhile undoes the pass."""
        try:
            while not self.done():
                self.note(await self.mailbox.next())
        except asyncio.CancelledError:
            self.cancel()
            raise

    def done(self) -> bool:
        """Whether there is a result, or an error."""
        if self.reply is None and (message := self.mailbox.peek()) is not None:
            self.note(message)
        return self.cancelled or self.reply is not None

    @property
    def failed(self) -> bool:
        """Whether it ended without a result."""
        return self.cancelled or (self.done() and (isinstance(self.reply, Lost) or "error" in self.reply))

    def value(self) -> dict[str, Any]:
        """What the server has replied; raises its error."""
        if self.is_undone:
            raise Closed("this pass was undone, because the one whose token it takes was cancelled")
        return self._connection.value(self.reply)

    def cancel(self) -> None:
        """Undo the pass and those that its tokens were fed to, unless somebody has their results."""
        after = self._followers()
        if not self.failed and not any(each.is_taken for each in (self, *after)):
            self.cancelled = True
            for each in after:
                each.is_undone = True
            self._connection.forget(self._request)
            with suppress(ConnectionFailed):
                self._connection.tell("pass.cancel", number=self.number)

    def _followers(self) -> list[Submitted]:
        return [one for fed in self.fed for one in (fed, *fed._followers())]


class RemoteExecution:
    """A pass on its way: await it for its output, or call `result()` from a thread without an event loop."""

    def __init__(self, forward: RemoteForward, submitted: Submitted) -> None:
        self._forward, self._submitted = forward, submitted

    def __repr__(self) -> str:
        cancelled = self._submitted.cancelled
        return f"<Execution: {'cancelled' if cancelled else 'done' if self.done() else 'running'}>"

    def __reduce__(self) -> NoReturn:
        raise Unsupported("a submitted pass cannot be pickled or copied; await it and keep its output")

    def __await__(self) -> Generator[Any, None, Output]:
        yield from self._submitted.wait().__await__()
        if self._submitted.cancelled:
            raise asyncio.CancelledError
        return self._forward._delivered()

    async def wait(self) -> None:
        """Wait for its end without taking the result: until somebody does, `cancel` undoes the pass."""
        while not self.done():
            self._submitted.note(await self._submitted.mailbox.next())

    def result(self, timeout: float | None = None) -> Output:
        """Wait in this thread; a pass that does not end in time (seconds) is undone."""
        seconds = check_timeout(timeout)
        try:
            if not self.done():
                self._submitted.note(self._submitted.mailbox.get(seconds))
        except BaseException as error:
            self.cancel()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"the pass did not end within {timeout} seconds and was undone; give it more, or None to wait"
                ) from None
            raise
        if self._submitted.cancelled:
            raise CancelledError
        return self._forward._delivered()

    def done(self) -> bool:
        """Whether there is a result, or an error."""
        return self._submitted.done()

    def cancel(self) -> None:
        """Undo the pass."""
        self._submitted.cancel()
