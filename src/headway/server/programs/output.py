"""What a program prints and sends: kept for readers that come later, up to a number of bytes, the newest last.

A program that has a reader waits for it; without one its oldest output is dropped, and a later reader is told so.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

NUMBER = 16  # bytes of an event's number, at most


class ProgramOutput:
    """The events of one program, numbered from 1. The last one has the type `end`."""

    def __init__(self, limit: int) -> None:
        self._limit, self.bytes = limit, 0
        self._events: deque[tuple[int, int, str, str | None]] = deque()  # number, bytes, JSON, text
        self._last = 0
        self._readers: dict[object, int] = {}  # the last number that each has taken
        self._changed = asyncio.Condition()
        self._released = False
        self.ended = False

    async def add(self, type: str, value: str | None = None, **values: Any) -> None:
        """Add an event, with a value that is JSON already; waits while a reader would lose one."""
        rest = json.dumps({"type": type, **values})[1:]
        if value is not None:
            rest = f'{rest[:-1]}, "value": {value}}}'
        size = len(rest) + NUMBER
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(size))
            while self._events and self.bytes + size > self._limit:
                self.bytes -= self._events.popleft()[1]
            self._last += 1
            self._events.append((self._last, size, f'{{"n": {self._last}, {rest}', values.get("text")))
            self.bytes += size
            self.ended = type == "end"
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        if self._released or not self._events or self.bytes + size <= self._limit:
            return True
        return all(taken >= self._events[0][0] for taken in self._readers.values())

    async def release(self) -> None:
        """Wait for no reader any more."""
        async with self._changed:
            self._released = True
            self._changed.notify_all()

    async def follow(self, after: int = 0) -> AsyncIterator[str]:
        """The events with higher numbers as JSON (ASCII), as they come, until the end."""
        reader = object()
        self._readers[reader] = after
        has_more = lambda: self._last > self._readers[reader] or self.ended  # noqa: E731
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(has_more)
                    missed = [(number, event) for number, _, event, _ in self._events if number > after]
                if missed and missed[0][0] > after + 1:
                    yield json.dumps({"type": "dropped", "count": missed[0][0] - after - 1})
                for number, event in missed:
                    yield event
                    after = number
                    await self._took(reader, after)
                if self.ended and after >= self._last:
                    return
        finally:
            await self._left(reader)

    async def _took(self, reader: object, number: int) -> None:
        async with self._changed:
            self._readers[reader] = number
            self._changed.notify_all()

    async def _left(self, reader: object) -> None:
        self._readers.pop(reader, None)
        async with self._changed:
            self._changed.notify_all()

    def printed(self) -> str:
        """What the program printed, as far as it is kept."""
        return "".join(text for *_, text in self._events if text is not None)
