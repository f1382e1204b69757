"""The scripted model on a device with decode rows of its own, which overlaps with the host or not.

The work of a device that overlaps waits in a line and is done in order, when somebody waits for a part of it: as late
as possible. A row reads its token from the step before where the host does not know it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from headway.base.specs.samplers import NO_TOKEN, UNDECIDED
from headway.kv.allocator import Edit
from headway.runtime.batch import Batch, DecodeRows, Segment
from headway.runtime.passes import DecodeMask
from headway.runtime.runners.base import SegmentResult, StepResult
from headway.testing import _hash, _sum
from support.scripted import Sticking


class DecodingRunner(Sticking):
    """Computes rows at once. `moods` says what becomes of the next steps of rows, one word each:

    refuses: nothing is computed · fails: all is, and no token comes back · undecided, nan: the first row has none.
    `faults` gathers what a device must never be asked for.
    """

    decode_limit = 6

    def __init__(self, vocab_size: int = 97, page_size: int = 16) -> None:
        super().__init__(vocab_size, page_size)
        self.moods: list[str] = []
        self.faults: list[str] = []
        self.decoded: list[int] = []  # decode rows of each step that has some
        self.mixed = 0  # steps with decode rows and chunks
        self.ahead = 0  # rows whose token the host did not know
        self._before: list[int] = []  # what the rows before drew

    def begin(self, batch: Batch) -> StepInLine:
        mood = "well"
        if batch.decode is not None:
            mood = self.moods.pop(0) if self.moods else "well"
            if mood == "refuses":
                raise RuntimeError("no memory for these rows")
            self.decoded.append(batch.decode_count)
            self.mixed += bool(batch.segments)
        step = StepInLine(self, batch, mood)
        self.give(step.compute)
        return step

    def edit(self, edits: Sequence[Edit]) -> None:
        self.catch_up()
        super().edit(edits)

    def give(self, work: Callable[[], None]) -> None:
        work()

    def catch_up(self, last: Callable[[], None] | None = None) -> None:
        """Do all that waits, or all up to `last`."""

    def compute_rows(self, rows: DecodeRows, mood: str) -> list[int]:
        """The tokens that the rows draw."""
        self.ahead += int((rows.tokens < 0).sum())
        given = [self._before[-1 - t] if t < 0 else t for t in rows.tokens.tolist()]
        found = [self._row(rows, i, max(token, 0)) for i, token in enumerate(given)]
        if mood in ("undecided", "nan"):
            found[0] = UNDECIDED if mood == "undecided" else NO_TOKEN
        self._before = found
        return found

    def _row(self, rows: DecodeRows, i: int, token: int) -> int:
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
        first = self._page(page)[0, offset] = _hash(token * 3 + 1, position)
        self._page(page)[1, offset] = 0
        self.check_clean(pages, slot)
        second = self._page(page)[1, offset] = _hash(int(first), _sum(self._all(0, pages), slots, seen))
        result = _hash(int(second), _sum(self._all(1, pages), slots, seen))
        if rows.states is not None:
            source, target = rows.states[i].tolist()
            result = _hash(result, *self._recur([token], source, {1: target}))
        value = self._value(rows.readouts[i], result, position)
        assert isinstance(value, int)
        return value

    def _all(self, part: int, pages: Sequence[int]) -> np.ndarray:
        return np.concatenate([self._page(p)[part] for p in pages])

    def check_clean(self, pages: Sequence[int], slot: int) -> None:
        """Nothing may stand after the last slot: an infinity there would show through every mask."""
        if any(self._all(part, pages)[slot + 1 :].any() for part in (0, 1)):
            self.faults.append(f"something stands after slot {slot}")

    def _segment(self, batch: Batch, segment: Segment, written: dict[int, int]) -> SegmentResult:
        if len(segment.rows) and len(segment.pages):
            behind = (int(segment.numbers[-1]) + 1) * self.page_size - 1 - int(segment.slots[-1])
            last = self._page(int(segment.pages[-1]))[:, self.page_size - behind :] if behind > 0 else np.zeros(0)
            # Rows that only bring recurrent state up to date are in their slots already, and so are those after them.
            replayed = segment.states is not None and segment.rows[-1] not in written
            if last.any() and not replayed:
                self.faults.append(f"something stands after slot {int(segment.slots[-1])} of a segment")
        return super()._segment(batch, segment, written)


class StepInLine:
    """A step in flight."""

    def __init__(self, runner: DecodingRunner, batch: Batch, mood: str) -> None:
        self._runner, self._batch, self._mood = runner, batch, mood
        self._result: StepResult | None = None
        self._error: Exception | None = None
        self._masks: Sequence[DecodeMask | None] = ()

    def compute(self) -> None:
        rows = self._batch.decode
        if rows is not None and any(self._masks):
            bound = zip(rows.readouts, self._masks, strict=True)
            rows = replace(rows, readouts=tuple(replace(readout, async_mask=mask) for readout, mask in bound))
        tokens = [] if rows is None else self._runner.compute_rows(rows, self._mood)
        try:
            self._result = StepResult(tokens, self._runner.execute(replace(self._batch, decode=None)))
        except Exception as error:
            self._error = error

    def masks(self, masks: Sequence[DecodeMask | None]) -> None:
        self._masks = masks

    def result(self) -> StepResult:
        self._runner.catch_up(self.compute)
        if self._mood == "fails":
            raise RuntimeError("the device failed")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class OverlappingRunner(DecodingRunner):
    """Computes concurrently with the host, as late as it may."""

    overlaps = True

    def __init__(self, vocab_size: int = 97, page_size: int = 16) -> None:
        super().__init__(vocab_size, page_size)
        self._line: list[Callable[[], None]] = []

    def give(self, work: Callable[[], None]) -> None:
        self._line.append(work)

    def catch_up(self, last: Callable[[], None] | None = None) -> None:
        while self._line and (last is None or last in self._line):
            self._line.pop(0)()
