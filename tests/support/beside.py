"""The scripted model on a device that takes rows which go on by themselves, beside the host or not.

What a device beside the host is given waits in a line and is done in order, when somebody waits for a part of it: as
late as can be. A row reads its token from the rows before where the host does not know it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headway.base.samplers import Sampling
from headway.runtime.batch import Batch, Rows, Segment
from headway.runtime.runners.base import NO_TOKEN, UNDECIDED, SegmentResult
from headway.testing import _mix, _sum
from support.scripted import Sticking


class Rowed(Sticking):
    """Computes rows at once. `moods` says what becomes of the next steps of rows, one word each:

    refuses: nothing is computed · fails: all is, and no token comes back · undecided, nan: the first row has none.
    `faults` gathers what a device must never be asked for.
    """

    measures = False
    most_rows = 6

    def __init__(self, vocab_size: int = 97, page_size: int = 16) -> None:
        super().__init__(vocab_size, page_size)
        self.moods: list[str] = []
        self.faults: list[str] = []
        self.flown: list[int] = []  # rows of each step
        self.ahead = 0  # rows whose token the host did not know
        self._before: list[int] = []  # what the rows before drew

    def draws(self, how: Sampling) -> bool:
        return not how.penalizes

    def begin_rows(self, rows: Rows) -> RowsOnTheirWay:
        mood = self.moods.pop(0) if self.moods else "well"
        if mood == "refuses":
            raise RuntimeError("no room for these rows")
        self.flown.append(len(rows))
        step = RowsOnTheirWay(self, rows, mood)
        self.give(step.compute)
        return step

    def give(self, work: Callable[[], None]) -> None:
        work()

    def catch_up(self) -> None:
        """Do all that waits."""

    def compute_rows(self, rows: Rows, mood: str) -> list[int]:
        """The tokens that the rows draw."""
        self.ahead += int((rows.tokens < 0).sum())
        given = [self._before[-1 - t] if t < 0 else t for t in rows.tokens.tolist()]
        found = [self._row(rows, i, max(token, 0)) for i, token in enumerate(given)]
        if mood in ("undecided", "nan"):
            found[0] = UNDECIDED if mood == "undecided" else NO_TOKEN
        self._before = found
        return found

    def _row(self, rows: Rows, i: int, token: int) -> int:
        slot, position, size = int(rows.slots[i]), int(rows.positions[i]), self.page_size
        pages = rows.pages[(int(rows.page_ends[i - 1]) if i else 0) : int(rows.page_ends[i])].tolist()
        if len(pages) <= slot // size or int(rows.write_slots[i]) != pages[slot // size] * size + slot % size:
            self.faults.append(f"slot {slot} is not where the table has it")
            return 0
        mask = None if rows.masks is None else rows.masks[i]
        slots, seen = np.arange(len(pages) * size), np.zeros(len(pages) * size, bool)
        for start, stop in ((0, slot + 1),) if mask is None else mask.intervals():
            seen[start:stop] = True
        page, offset = pages[slot // size], slot % size
        first = self._page(page)[0, offset] = _mix(token * 3 + 1, position)
        self._page(page)[1, offset] = 0
        self.check_clean(pages, slot)
        second = self._page(page)[1, offset] = _mix(int(first), _sum(self._all(0, pages), slots, seen))
        value = self._value(rows.readouts[i], _mix(int(second), _sum(self._all(1, pages), slots, seen)), position)
        assert isinstance(value, int)
        return value

    def _all(self, part: int, pages: Sequence[int]) -> np.ndarray:
        return np.concatenate([self._page(p)[part] for p in pages])

    def check_clean(self, pages: Sequence[int], slot: int) -> None:
        """Nothing may stand behind the last slot: an infinity there would show through every mask."""
        if any(self._all(part, pages)[slot + 1 :].any() for part in (0, 1)):
            self.faults.append(f"something stands behind slot {slot}")

    def execute(self, batch: Batch) -> list[SegmentResult]:
        self.catch_up()
        return super().execute(batch)

    def _segment(self, batch: Batch, segment: Segment, written: dict[int, int]) -> SegmentResult:
        if len(segment.rows) and len(segment.pages):
            behind = (int(segment.numbers[-1]) + 1) * self.page_size - 1 - int(segment.slots[-1])
            last = self._page(int(segment.pages[-1]))[:, self.page_size - behind :] if behind > 0 else np.zeros(0)
            if last.any():
                self.faults.append(f"something stands behind slot {int(segment.slots[-1])} of a segment")
        return super()._segment(batch, segment, written)


class RowsOnTheirWay:
    """A step of rows."""

    def __init__(self, runner: Rowed, rows: Rows, mood: str) -> None:
        self._runner, self._rows, self._mood = runner, rows, mood
        self._found: list[int] | None = None

    def compute(self) -> None:
        self._found = self._runner.compute_rows(self._rows, self._mood)

    def draw(self, masks: Sequence[Any]) -> None:
        assert not any(masks), "this device draws without masks that follow"

    def tokens(self) -> list[Any]:
        self._runner.catch_up()
        if self._mood == "fails":
            raise RuntimeError("the device failed")
        assert self._found is not None
        return list(self._found)

    __call__ = tokens


class Beside(Rowed):
    """Computes beside the host, as late as it may."""

    def __init__(self, vocab_size: int = 97, page_size: int = 16) -> None:
        super().__init__(vocab_size, page_size)
        self._line: list[Callable[[], None]] = []

    def give(self, work: Callable[[], None]) -> None:
        self._line.append(work)

    def catch_up(self) -> None:
        while self._line:
            self._line.pop(0)()

    def begin(self, batch: Batch) -> Callable[[], list[SegmentResult]]:
        return lambda: self.execute(batch)
