"""Which waiting rows are computed next: those of like length around the oldest, up to a budget. Pure bookkeeping.

The oldest row is in every choice, so nothing starves; its mates are its neighbours by length, so little is padded.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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
        self._lengths: list[int] = []  # that rows wait with, ascending
        self._by_length: dict[int, deque[Slot]] = {}
        self._by_age: deque[Slot] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def oldest(self) -> int:
        """The serial number of the oldest row."""
        return self._by_age[0].serial

    def add(self, slots: Iterable[Slot]) -> None:
        """Put rows in line; serial numbers must grow."""
        for slot in slots:
            self._by_age.append(slot)
            same = self._by_length.get(slot.length)
            if same is None:
                same = self._by_length[slot.length] = deque()
                insort(self._lengths, slot.length)
            same.append(slot)
            self._count += 1

    def take(self, limits: Limits) -> list[Slot]:
        """The next batch, by length; the rows leave the line."""
        start = bisect_left(self._lengths, self._by_age[0].length)
        chosen = [slot for some in self._around(start, limits) for slot in some]
        for slot in chosen:
            slot.taken = True
        self._count -= len(chosen)
        while self._by_age and self._by_age[0].taken:
            self._by_age.popleft()
        self._lengths = [length for length in self._lengths if self._by_length[length] or self._forget(length)]
        return chosen

    def _forget(self, length: int) -> bool:
        del self._by_length[length]
        return False

    def _around(self, start: int, limits: Limits) -> list[list[Slot]]:
        """Rows of the length at `start`, then of the next nearest lengths, as many as a batch may hold; ascending."""
        lengths, plan = self._lengths, _Plan(limits)
        found = [self._pop(lengths[start], plan)]
        low, high = start - 1, start + 1
        while plan.rows < limits.rows and (low >= 0 or high < len(lengths)):
            below = lengths[start] - lengths[low] if low >= 0 else None
            above = lengths[high] - lengths[start] if high < len(lengths) else None
            up = above is not None and (below is None or above <= below)
            some = self._pop(lengths[high if up else low], plan)
            found.insert(len(found) if up else 0, some)
            whole = not self._by_length[lengths[high if up else low]]
            # a direction ends where a row did not fit
            if up:
                high = high + 1 if whole else len(lengths)
            else:
                low = low - 1 if whole else -1
        return found

    def _pop(self, length: int, plan: _Plan) -> list[Slot]:
        same = self._by_length[length]
        count = min(plan.room(length), len(same))
        plan.add(count, length)
        return [same.popleft() for _ in range(count)]


class _Plan:
    """A batch that grows."""

    __slots__ = ("limits", "longest", "rows", "tokens")

    def __init__(self, limits: Limits) -> None:
        self.limits, self.rows, self.tokens, self.longest = limits, 0, 0, 0

    def add(self, count: int, length: int) -> None:
        self.rows += count
        self.tokens += count * length
        self.longest = max(self.longest, length) if count else self.longest

    def room(self, length: int) -> int:
        """How many rows of this length may be added; the first row may always."""
        rows = self.limits.rows - self.rows
        if not self.limits.padded:
            fit = (self.limits.tokens - self.tokens) // length
        else:
            longest = max(self.longest, length)
            fit = min(self.limits.tokens // longest - self.rows, self._before_waste(length, longest))
        return max(min(rows, fit), 0 if self.rows else 1)

    def _before_waste(self, length: int, longest: int) -> int:
        """How many rows keep the share of padding within WASTE: the first must, and each of the others."""
        spare = WASTE * (self.rows + 1) * longest - ((self.rows + 1) * longest - self.tokens - length)
        if spare < 0:
            return 0
        each = longest - length - WASTE * longest  # what one more row takes of what is spare
        return 1 + int(spare / each - 1e-9) if each > 0 else 1 << 62
