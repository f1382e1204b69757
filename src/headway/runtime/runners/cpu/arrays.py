"""A batch as the native step wants it: one buffer of int32, filled again each step, and addresses into it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from headway.base.brle import Brle
from headway.kernels.native import library
from headway.runtime.batch import Batch, Rows, Segment
from headway.runtime.runners.attention_groups import dense_mask, segment_slots, windowed


class Ints:
    """Room for a step's numbers. What is put stays where it is until `clear`."""

    def __init__(self) -> None:
        self._room(1 << 14)
        self._at = 0
        self._full: list[np.ndarray] = []  # buffers that earlier parts of this step lie in

    def _room(self, count: int) -> None:
        self._buffer = np.empty(count, np.int32)
        self._base = self._buffer.ctypes.data

    def clear(self) -> None:
        self._at = 0
        self._full.clear()

    def put(self, values: Sequence[int] | np.ndarray) -> int:
        """Copy the values; where they lie."""
        count = len(values)
        if self._at + count > len(self._buffer):
            self._full.append(self._buffer)
            self._room(max(2 * len(self._buffer), 2 * count))
            self._at = 0
        start = self._at
        if count:
            self._buffer[start : start + count] = values
        self._at = start + count
        return self._base + 4 * start


class StepArrays:
    """Fills one `library.StepStruct` over and over. Owned by the runner, used by the worker thread alone."""

    def __init__(self, windows: Sequence[int | None], page_size: int) -> None:
        self.windows, self.page_size = windows, page_size
        self.step = library.StepStruct()
        self._ints = Ints()
        self._runs_at = (ctypes.c_void_p * len(windows))()
        self._runs = (ctypes.c_void_p * len(windows))()
        self.step.mask_sets = len(windows)
        self.step.runs_at, self.step.runs = ctypes.addressof(self._runs_at), ctypes.addressof(self._runs)

    def fill(self, batch: Batch) -> library.StepStruct:
        """The batch's rows, pages and masks; hooks, reads and outputs are the caller's to set."""
        put, step, segments = self._ints.put, self.step, batch.segments
        self._ints.clear()
        rows = len(batch.tokens)
        step.rows, step.segments = rows, len(segments)
        step.tokens, step.positions = put(batch.tokens), put(batch.positions)
        step.write_slots = put(_written(batch, rows))
        step.segment_rows = put(_ends([len(s.rows) for s in segments]))
        step.segment_pages = put(_ends([len(s.pages) for s in segments]))
        step.pages = put(segments[0].pages if len(segments) == 1 else np.concatenate([s.pages for s in segments]))
        step.numbers = put(segments[0].numbers if len(segments) == 1 else np.concatenate([s.numbers for s in segments]))
        for i, window in enumerate(self.windows):
            at, pairs = runs(segments, window, self.page_size)
            self._runs_at[i], self._runs[i] = put(at), put(pairs)
        step.hidden_count = step.query_count = step.reads = 0
        return step

    def fill_rows(self, rows: Rows) -> library.StepStruct:
        """The same for rows that go on by themselves; each is read."""
        put, step, count = self._ints.put, self.step, len(rows)
        self._ints.clear()
        step.rows, step.segments = count, count
        step.tokens, step.positions = put(rows.tokens), put(rows.positions)
        step.write_slots = put(rows.write_slots)
        step.segment_rows = put(range(count + 1))
        starts = np.concatenate(([0], rows.page_ends))
        step.segment_pages, step.pages = put(starts), put(rows.pages)
        step.numbers = put(np.arange(len(rows.pages)) - np.repeat(starts[:-1], np.diff(starts)))
        for i, window in enumerate(self.windows):
            at, pairs = row_runs(rows, window)
            self._runs_at[i], self._runs[i] = put(at), put(pairs)
        step.hidden_count = step.query_count = 0
        step.reads, step.read_rows = count, put(range(count))
        return step

    def put(self, values: Sequence[int]) -> int:
        return self._ints.put(values)


def row_runs(rows: Rows, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """`runs` for rows that go on by themselves: those with a window have no masks, and stand at their own positions."""
    count = len(rows)
    if rows.masks is None:
        pairs = np.zeros((count, 2), np.int64)
        pairs[:, 1] = rows.slots + 1
        if window is not None:
            pairs[:, 0] = np.maximum(0, pairs[:, 1] - window)
        return np.arange(count + 1), pairs.ravel()
    assert window is None
    ends, found = [0], []
    for mask, slot in zip(rows.masks, rows.slots.tolist(), strict=True):
        intervals = ((0, slot + 1),) if mask is None else mask.intervals()
        for interval in intervals:
            found += interval
        ends.append(len(found) // 2)
    return np.array(ends), np.array(found)


def _written(batch: Batch, rows: int) -> np.ndarray:
    """The physical slot that each row goes to, -1 for a row that is not kept."""
    if len(batch.write_rows) == rows:
        return batch.write_slots
    write = np.full(rows, -1)
    write[batch.write_rows] = batch.write_slots
    return write


def _ends(sizes: Sequence[int]) -> list[int]:
    at, total = [0], 0
    for size in sizes:
        total += size
        at.append(total)
    return at


def runs(
    segments: Sequence[Segment], window: int | None, page_size: int
) -> tuple[list[int] | range, list[int] | np.ndarray]:
    """What every row attends to: where its runs begin, [T + 1], and first slot and slot behind the last of each."""
    if window is None and all(len(s.rows) == 1 and s.masks[0] is None for s in segments):
        pairs: list[int] = []
        for segment in segments:  # the common case, without an array for each
            pairs += (0, int(segment.slots[0]) + 1)
        return range(len(segments) + 1), pairs
    counts: list[int] = []
    parts: list[np.ndarray] = []
    for segment in segments:
        plain = _plain(segment, window)
        if plain is not None:
            counts += [1] * len(plain)
            parts.append(plain.ravel())
            continue
        found = [list(r.intervals()) for r in _rows(segment, window, page_size)]
        counts += [len(f) for f in found]
        parts.append(np.array([p for f in found for p in f], np.int64).ravel())
    return _ends(counts), np.concatenate(parts) if parts else []


def _plain(segment: Segment, window: int | None) -> np.ndarray | None:
    """One run for each row, [R, 2], where no row has a mask of its own and positions go with slots."""
    if any(m is not None for m in segment.masks):
        return None
    first = np.zeros(len(segment.slots), np.int64)
    if window is not None:
        known = segment.slot_positions
        if (np.diff(known) <= 0).any():
            return None
        first = np.searchsorted(known, known[segment.slots] - window, side="right")
    return np.stack([first, segment.slots + 1], axis=1)


def _rows(segment: Segment, window: int | None, page_size: int) -> list[Brle]:
    if window is None:
        return [Brle.ones(int(s) + 1) if m is None else m for s, m in zip(segment.slots, segment.masks, strict=True)]
    slots = segment_slots(segment, page_size)
    mask = windowed(segment, dense_mask(segment, page_size), window, page_size)
    found = []
    for row in mask:
        bits = np.zeros(int(slots[-1]) + 1, dtype=bool)
        bits[slots[row]] = True
        found.append(Brle.from_bool(bits))
    return found
