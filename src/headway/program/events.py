"""The engine's events, for monitors."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator

from headway.base.checks import check_integer
from headway.base.closing import Closing
from headway.base.events import StepEvent
from headway.runtime.loop import Loop

POLL = 0.25  # seconds between looks at whether the stream was closed


class EventStream(Closing):
    """Step events as they happen; a reader more than `limit` events late loses the oldest (`lost` counts them)."""

    def __init__(self, loop: Loop, limit: int) -> None:
        limit = check_integer(limit, "limit", 1)
        self._events: queue.Queue[StepEvent] = queue.Queue(limit)
        self._loop, self._closed = loop, False
        self.lost = 0
        with loop.lock:
            loop.listeners.append(self._receive)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<EventStream: {self._events.qsize()} events waiting, {self.lost} lost, {state}>"

    def _receive(self, event: StepEvent) -> None:
        """Called by the worker, the only thread that puts events."""
        if self._events.full() and self.poll() is not None:
            self.lost += 1
        self._events.put_nowait(event)

    def poll(self, timeout: float = 0.0) -> StepEvent | None:
        """The next event, or None when none arrives in time."""
        try:
            return self._events.get(timeout=timeout) if timeout else self._events.get_nowait()
        except queue.Empty:
            return None

    def __iter__(self) -> Iterator[StepEvent]:
        while not self._closed:
            event = self.poll(POLL)
            if event is not None:
                yield event

    async def __aiter__(self) -> AsyncIterator[StepEvent]:
        while not self._closed:
            event = await asyncio.to_thread(self.poll, POLL)
            if event is not None:
                yield event

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with self._loop.lock:
            if self._receive in self._loop.listeners:
                self._loop.listeners.remove(self._receive)
