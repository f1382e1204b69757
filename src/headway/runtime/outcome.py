"""The outcome of a pass: set once, from any thread; threads wait for it, event loops are woken.

There is one for every pass, so it is light: what a thread waits on is created only when one waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from headway.runtime.job import Delivery, Job

Value = TypeVar("Value")
_setting = threading.Lock()  # held for a moment by whoever sets an outcome or begins to wait for one


class Outcome(Generic[Value]):
    """A value, an error, or a cancellation. The first one set stays."""

    __slots__ = ("_error", "_is_cancelled", "_is_set", "_value", "_waiting")

    def __init__(self) -> None:
        self._is_set = self._is_cancelled = False
        self._value: Value | None = None
        self._error: BaseException | None = None
        self._waiting: threading.Event | None = None

    def done(self) -> bool:
        return self._is_set

    def cancelled(self) -> bool:
        return self._is_cancelled

    def succeed(self, value: Value) -> None:
        self._set(value, None, False)

    def fail(self, error: BaseException) -> None:
        self._set(None, error, False)

    def cancel(self) -> None:
        self._set(None, None, True)

    def _set(self, value: Value | None, error: BaseException | None, is_cancelled: bool) -> None:
        with _setting:
            if self._is_set:
                return
            self._value, self._error, self._is_cancelled = value, error, is_cancelled
            self._is_set = True
            waiting = self._waiting
        if waiting is not None:
            waiting.set()

    def result(self, timeout: float | None = None) -> Value:
        """Wait for it; raises its error, CancelledError, or TimeoutError."""
        if not self._is_set and not self._wait(timeout):
            raise TimeoutError
        if self._is_cancelled:
            raise CancelledError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _wait(self, timeout: float | None) -> bool:
        with _setting:
            if self._is_set:
                return True
            if self._waiting is None:
                self._waiting = threading.Event()
        return self._waiting.wait(timeout)


def resolve(deliveries: Iterable[Delivery]) -> None:
    """Give every job its result or its error. Needs no lock."""
    for job, error in deliveries:
        if error is not None:
            job.outcome.fail(error)
        elif job.decode is None and not job.outcome.done():
            job.outcome.succeed(job.result())


def wake_all(jobs: Iterable[Job]) -> None:
    """Wake everyone who awaits one of these jobs, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for job in jobs:
        for loop, waiter in job.waiters:
            by_loop.setdefault(loop, []).append(waiter)
    for loop, waiters in by_loop.items():
        with suppress(RuntimeError):  # that loop was closed, and nobody waits there any more
            loop.call_soon_threadsafe(_wake, waiters)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    """In the thread of their event loop: let them go on."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
