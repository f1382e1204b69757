"""A submitted pass: waiting for its output, in an event loop or a thread, and undoing it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from headway.base.checks import check_timeout
from headway.base.errors import Closed, DeadlineExceeded, Unsupported
from headway.runtime.job import Job
from headway.runtime.passes import PassResult

if TYPE_CHECKING:
    from headway.program.context import Context

Result = TypeVar("Result")


class Execution(Generic[Result]):
    """A submitted pass: await it for its output, or call `result()` from a thread without an event loop."""

    def __init__(self, job: Job, context: Context, finish: Callable[[PassResult], Result]) -> None:
        self._job, self._context, self._finish = job, context, finish
        self._delivered_before = self._cancelled = False

    def __repr__(self) -> str:
        outcome = self._job.outcome
        cancelled = outcome.cancelled() or self._is_undone
        return f"<Execution: {'cancelled' if cancelled else 'done' if outcome.done() else 'running'}>"

    def __reduce__(self) -> NoReturn:
        raise Unsupported("a submitted pass cannot be pickled or copied; await it and keep its output")

    def __await__(self) -> Generator[Any, None, Result]:
        job, loop = self._job, asyncio.get_running_loop()
        waiter = loop.create_future()
        job.waiters.append((loop, waiter))  # first: the worker resolves the outcome before it wakes waiters
        try:
            if not job.outcome.done():
                yield from waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        if job.outcome.cancelled() or self._is_undone:
            raise asyncio.CancelledError
        return self._delivered(job.outcome.result())

    def result(self, timeout: float | None = None) -> Result:
        """Wait in this thread; a pass that does not end in time (seconds) is undone."""
        seconds = check_timeout(timeout)
        try:
            limit = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
            return self._delivered(self._job.outcome.result(limit))
        except BaseException as error:
            if self._job.outcome.done():
                raise
            self.cancel()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"the pass did not end within {timeout} seconds and was undone; give it more, or None to wait"
                ) from None
            raise

    async def wait(self) -> None:
        """Wait for its end without taking the result: until somebody does, `cancel` undoes the pass."""
        job, loop = self._job, asyncio.get_running_loop()
        waiter = loop.create_future()
        job.waiters.append((loop, waiter))
        if not job.outcome.done():
            await waiter

    def done(self) -> bool:
        """Whether there is a result, or an error."""
        return self._job.outcome.done()

    def cancel(self) -> None:
        """Undo the pass."""
        self._cancelled = True
        self._context.engine._loop.abandon(self._job)

    @property
    def _is_undone(self) -> bool:
        """Whether it was cancelled here after its end, and undone: its outcome still has the result."""
        return self._cancelled and self._job.abandoned

    def _delivered(self, result: PassResult) -> Result:
        if self._is_undone:
            raise CancelledError
        if self._job.abandoned:
            raise Closed("this pass was undone, because the one whose token it takes was cancelled")
        self._job.settle()
        if not self._delivered_before:
            self._delivered_before = True
            self._context.cached_tokens += result.stats.cache_hits * self._context.page_size
            if self._context._queue_seconds is None and self._job.began:
                self._context._queue_seconds = self._job.began - self._job.arrived
        return self._finish(result)
