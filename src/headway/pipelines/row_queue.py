"""Which waiting rows are computed next: rows of similar length around the oldest, up to a budget. Pure bookkeeping.

The oldest row is in every batch, so nothing starves; the others are its neighbors by length, so padding stays small.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Any

from headway.base.dataclass import dataclass

MAX_PADDING = 0.2  # the share of a padded batch that may be padding


@dataclass(frozen=True)
class BatchLimits:
    """How much one batch may hold: `tokens` in all (padding counts) and `rows`; `padded` to one length or not."""

    tokens: int
    rows: int
    padded: bool = True


class WaitingRow:
    """A row in the queue, and where its result goes: row `index` of `job`."""

    __slots__ = ("index", "job", "length", "row", "serial", "taken")

    def __init__(self, row: Any, job: Any, index: int, serial: int) -> None:
        self.row, self.job, self.index, self.serial = row, job, index, serial
        self.length: int = row.length
        self.taken = False


class RowQueue:
    """Rows that may share a batch, by length and by age."""

    def __init__(self) -> None:
        self._lengths: list[int] = []  # lengths of the waiting rows, ascending
        self._by_length: dict[int, deque[WaitingRow]] = {}
        self._by_age: deque[WaitingRow] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def oldest(self) -> int:
        """The serial number of the oldest row."""
        return self._by_age[0].serial

    def add(self, rows: Iterable[WaitingRow]) -> None:
        """Append rows; serial numbers must grow."""
        for row in rows:
            self._by_age.append(row)
            same = self._by_length.get(row.length)
            if same is None:
                same = self._by_length[row.length] = deque()
                insort(self._lengths, row.length)
            same.append(row)
            self._count += 1

    def take(self, limits: BatchLimits) -> list[WaitingRow]:
        """Remove and return the next batch, by ascending length."""
        start = bisect_left(self._lengths, self._by_age[0].length)
        chosen = [row for rows in self._around(start, limits) for row in rows]
        for row in chosen:
            row.taken = True
        self._count -= len(chosen)
        while self._by_age and self._by_age[0].taken:
            self._by_age.popleft()
        self._lengths = [length for length in self._lengths if self._by_length[length] or self._forget(length)]
        return chosen

    def _forget(self, length: int) -> bool:
        del self._by_length[length]
        return False

    def _around(self, start: int, limits: BatchLimits) -> list[list[WaitingRow]]:
        """As many rows as a batch may hold: of the length at `start`, then of the nearest lengths; ascending."""
        lengths, batch = self._lengths, _GrowingBatch(limits)
        groups = [self._pop(lengths[start], batch)]
        low, high = start - 1, start + 1
        while batch.rows < limits.rows and (low >= 0 or high < len(lengths)):
            below = lengths[start] - lengths[low] if low >= 0 else None
            above = lengths[high] - lengths[start] if high < len(lengths) else None
            up = above is not None and (below is None or above <= below)
            rows = self._pop(lengths[high if up else low], batch)
            groups.insert(len(groups) if up else 0, rows)
            emptied = not self._by_length[lengths[high if up else low]]
            # stop in a direction once a row did not fit
            if up:
                high = high + 1 if emptied else len(lengths)
            else:
                low = low - 1 if emptied else -1
        return groups

    def _pop(self, length: int, batch: _GrowingBatch) -> list[WaitingRow]:
        same = self._by_length[length]
        count = min(batch.capacity(length), len(same))
        batch.add(count, length)
        return [same.popleft() for _ in range(count)]


class _GrowingBatch:
    """The size of a batch while rows are added to it."""

    __slots__ = ("limits", "longest", "rows", "tokens")

    def __init__(self, limits: BatchLimits) -> None:
        self.limits, self.rows, self.tokens, self.longest = limits, 0, 0, 0

    def add(self, count: int, length: int) -> None:
        self.rows += count
        self.tokens += count * length
        self.longest = max(self.longest, length) if count else self.longest

    def capacity(self, length: int) -> int:
        """How many rows of this length may be added; the first row always may."""
        rows = self.limits.rows - self.rows
        if not self.limits.padded:
            fit = (self.limits.tokens - self.tokens) // length
        else:
            longest = max(self.longest, length)
            fit = min(self.limits.tokens // longest - self.rows, self._within_padding(length, longest))
        return max(min(rows, fit), 0 if self.rows else 1)

    def _within_padding(self, length: int, longest: int) -> int:
        """How many rows keep the share of padding within MAX_PADDING, after each one that is added."""
        spare = MAX_PADDING * (self.rows + 1) * longest - ((self.rows + 1) * longest - self.tokens - length)
        if spare < 0:
            return 0
        each = longest - length - MAX_PADDING * longest  # how much of `spare` one more row uses
        return 1 + int(spare / each - 1e-9) if each > 0 else 1 << 62
