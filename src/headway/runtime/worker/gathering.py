"""How long the worker waits after a step, so that programs that got a result share the next one.

They are many and take turns, so it lasts while they keep coming. It decides and does not wait itself.
"""

from __future__ import annotations

import time

MOST_SECONDS = 0.02  # at most, and never longer than the step took
GAP_SHARE = 0.1  # of the step's own time: if nobody comes back for that long, the others are busy elsewhere


class Gathering:
    """The programs that have yet to come back with their next pass, and for how long they are waited for."""

    def __init__(self) -> None:
        self.expected = 0  # jobs in the queue when all are back
        self.gap = 0.0  # seconds without anybody, after which it is over
        self._until = 0.0

    def begin(self, expected: int, seconds: float) -> None:
        """A step of so many seconds has ended, and this many programs get a result."""
        self.expected = expected
        self.gap = min(MOST_SECONDS, seconds * GAP_SHARE)
        self._until = time.perf_counter() + min(MOST_SECONDS, seconds)

    def end(self) -> None:
        """Nobody is waited for."""
        self.expected = 0

    def is_complete(self, queued: int) -> bool:
        """Whether everybody is back."""
        return queued >= self.expected

    @property
    def is_late(self) -> bool:
        """Whether those who are missing are waited for no longer."""
        return time.perf_counter() > self._until
