"""What arrives for somebody who waits: in a thread, or in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any


class Mailbox:
    """A queue with one reader, filled by the connection's thread.

    `new_event` makes what a reader waits on: where there are no threads, waiting fetches messages.
    """

    def __init__(self, new_event: Callable[[], threading.Event] = threading.Event) -> None:
        self._new_event = new_event
        self._items: deque[Any] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None

    def put(self, item: Any) -> None:
        with self._lock:
            self._items.append(item)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def peek(self) -> Any:
        """The next one, which stays; None if there is none."""
        with self._lock:
            return self._items[0] if self._items else None

    def get(self, timeout: float | None = None) -> Any:
        """The next one; waits in this thread, and raises `TimeoutError` after so many seconds."""
        while True:
            event = self._new_event()
            with self._lock:
                if self._items:
                    return self._items.popleft()
                self._wake = event.set
            if not event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
                raise TimeoutError

    async def next(self) -> Any:
        """The next one; waits in this event loop."""
        loop = asyncio.get_running_loop()
        while True:
            future = loop.create_future()
            with self._lock:
                if self._items:
                    return self._items.popleft()
                self._wake = partial(_wake, loop, future)
            await future

    def take_calls(self) -> list[dict[str, Any]]:
        """What the server asks of the program; steps and the connection's end stay."""
        with self._lock:
            calls = [m for m in self._items if isinstance(m, dict) and "method" in m]
            self._items = deque(m for m in self._items if not isinstance(m, dict) or "method" not in m)
        return calls

    def clear_steps(self) -> None:
        """Forget steps of a generation that were taken back."""
        with self._lock:
            self._items = deque(m for m in self._items if not isinstance(m, dict) or m.get("type") != "step")


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))
