"""Which waiting rows are computed next: those of like length around the oldest, up to a budget. Pure bookkeeping.

The oldest row is in every choice, so nothing starves; its mates are its neighbours by length, so little is padded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WASTE = 0.2  # the share of a padded batch that may be padding


@dataclass(frozen=True)
class Limits:
    """How much one batch may hold: `tokens` in all (padding counted), `rows`; `padded` if rows are padded alike."""

    tokens: int
    rows: int
    padded: bool = True


class Slot:
    """A row that waits, and where its result goes."""

    __slots__ = ("length", "place", "row", "serial", "taken", "ticket")

    def __init__(self, row: Any, ticket: Any, place: int, serial: int) -> None:
        self.row, self.ticket, self.place, self.serial = row, ticket, place, serial
        self.length: int = row.length
        self.taken = False


class Waiting:
    """Rows that may share a batch, by length and by age."""

    def __init__(self) -> None:
        self._by_length: list[tuple[int, int, Slot]] = []
        self._by_age: deque[Slot] = deque()

    def __len__(self) -> int:
        return len(self._by_length)

    @property
    def oldest(self) -> int:
        """The serial number of the oldest row."""
        return self._by_age[0].serial

    def add(self, slots: Iterable[Slot]) -> None:
        """Put rows in line; serial numbers must grow."""
        before = len(self._by_length)
        for slot in slots:
            self._by_length.append((slot.length, slot.serial, slot))
            self._by_age.append(slot)
        if len(self._by_length) > before:
            self._by_length.sort()  # nearly sorted already: cheap

    def take(self, limits: Limits) -> list[Slot]:
        """The next batch, by length; the rows leave the line."""
        first = self._by_age[0]
        low, high = self._run(bisect_left(self._by_length, (first.length, first.serial)), limits)
        chosen = [slot for _, _, slot in self._by_length[low:high]]
        del self._by_length[low:high]
        for slot in chosen:
            slot.taken = True
        while self._by_age and self._by_age[0].taken:
            self._by_age.popleft()
        return chosen

    def _run(self, at: int, limits: Limits) -> tuple[int, int]:
        """The stretch [low, high) around `at` that a batch may hold."""
        line, low, high = self._by_length, at, at + 1
        total = longest = shortest = line[at][0]
        while high - low < limits.rows:
            below = line[low - 1][0] if low else None
            above = line[high][0] if high < len(line) else None
            # the neighbour that is nearer in length; above first when equal, to keep rows of one length together
            up = above is not None and (below is None or above - longest <= shortest - below)
            length = above if up else below
            if length is None:
                break
            count, most = high - low + 1, max(longest, length)
            cost = count * most if limits.padded else total + length
            if cost > limits.tokens or (limits.padded and count * most - total - length > WASTE * count * most):
                other = None if not up else below
                if other is None or not self._fits(other, total, longest, high - low + 1, limits):
                    break
                up, length = False, other
            total, longest, shortest = total + length, max(longest, length), min(shortest, length)
            low, high = (low, high + 1) if up else (low - 1, high)
        return low, high

    @staticmethod
    def _fits(length: int, total: int, longest: int, count: int, limits: Limits) -> bool:
        if not limits.padded:
            return total + length <= limits.tokens
        padded = count * longest
        return padded <= limits.tokens and padded - total - length <= WASTE * padded
