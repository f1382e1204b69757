"""The outcome of a pass: set once, from any thread, and waited for by threads.

There is one for every token, so it is light: event loops are woken by other means (answers.py), and what
a thread waits on is made only when one does.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

Value = TypeVar("Value")
_setting = threading.Lock()  # held for a moment, by whoever sets an outcome or begins to wait for one


class Outcome(Generic[Value]):
    """A value, an error, or nothing any more (cancelled). The first that comes stays."""

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
