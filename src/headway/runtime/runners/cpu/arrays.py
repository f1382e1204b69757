"""A batch as the native step reads it: one buffer of int32, filled again each step, and addresses into it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from headway.kernels.native import library
from headway.runtime.batch import Batch
from headway.runtime.runners.cpu.adapters import StepAdapters
from headway.runtime.runners.mask_runs import Numbers, mask_runs


class IntBuffer:
    """A buffer for a step's numbers. What is put stays where it is until `clear`."""

    def __init__(self) -> None:
        self._allocate(1 << 14)
        self._at = 0
        self._full: list[np.ndarray] = []  # buffers that hold earlier parts of this step

    def _allocate(self, count: int) -> None:
        self._buffer = np.empty(count, np.int32)
        self._base = self._buffer.ctypes.data

    def clear(self) -> None:
        self._at = 0
        self._full.clear()

    def put(self, *parts: Numbers) -> int:
        """Copy the parts one after the other; returns their address."""
        count = sum(map(len, parts))
        if self._at + count > len(self._buffer):
            self._full.append(self._buffer)
            self._allocate(max(2 * len(self._buffer), 2 * count))
            self._at = 0
        start = self._at
        for part in parts:
            end = self._at + len(part)
            if len(part):
                self._buffer[self._at : end] = part
            self._at = end
        return self._base + 4 * start


class StepArrays:
    """Fills one `library.StepStruct` over and over. Owned by the runner, used by the worker thread alone."""

    def __init__(self, windows: Sequence[int | None], page_size: int) -> None:
        self.windows, self.page_size = windows, page_size
        self.step = library.StepStruct()
        self._ints = IntBuffer()
        self._runs_at = (ctypes.c_void_p * len(windows))()
        self._runs = (ctypes.c_void_p * len(windows))()
        self._adapters = StepAdapters()
        self.step.mask_sets = len(windows)
        self.step.runs_at, self.step.runs = ctypes.addressof(self._runs_at), ctypes.addressof(self._runs)

    def fill(self, batch: Batch) -> library.StepStruct:
        """The batch's rows, pages and masks, decode rows first; hooks, reads and outputs are the caller's to set."""
        put, step, segments, decode = self._ints.put, self.step, batch.segments, batch.decode
        self._ints.clear()
        count, pages_before = batch.decode_count, 0
        step.rows, step.segments = batch.rows, count + len(segments)
        rows_at: Numbers = _ends([len(s.rows) for s in segments], count)
        if decode is None:
            step.tokens, step.positions = put(batch.tokens), put(batch.positions)
            step.write_slots, step.segment_rows = put(_write_slots(batch)), put(rows_at)
            step.segment_pages = put(_ends([len(s.pages) for s in segments]))
            step.pages, step.numbers = put(*[s.pages for s in segments]), put(*[s.numbers for s in segments])
        else:
            step.tokens, step.positions = put(decode.tokens, batch.tokens), put(decode.positions, batch.positions)
            step.write_slots = put(decode.write_slots, _write_slots(batch))
            step.segment_rows = put(range(count), rows_at)
            starts = np.concatenate(([0], decode.page_ends))
            pages_before = len(decode.pages)
            numbers = np.arange(pages_before) - np.repeat(starts[:-1], np.diff(starts))
            step.segment_pages = put(starts[:-1], _ends([len(s.pages) for s in segments], pages_before))
            step.pages = put(decode.pages, *[s.pages for s in segments])
            step.numbers = put(numbers, *[s.numbers for s in segments])
        for i, window in enumerate(self.windows):
            at, pairs = mask_runs(batch, window, self.page_size)
            self._runs_at[i], self._runs[i] = put(at), put(pairs)
        self._adapters.fill(step, batch.adapters)
        step.hidden_count = step.query_count = step.reads = 0
        return step

    def put(self, values: Numbers) -> int:
        return self._ints.put(values)


def _write_slots(batch: Batch) -> np.ndarray:
    """The physical slot of each row of the segments, -1 for a row that is not kept."""
    rows = len(batch.tokens)
    if len(batch.write_rows) == rows:
        return batch.write_slots
    write = np.full(rows, -1)
    write[batch.write_rows] = batch.write_slots
    return write


def _ends(sizes: Sequence[int], first: int = 0) -> list[int]:
    return list(accumulate(sizes, initial=first))
