"""A batch as the native step reads it: one buffer of int32, filled again each step, and addresses into it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from headway.base.dataclass import dataclass
from headway.kernels.host.attention import Window
from headway.kernels.native import library
from headway.runtime.batch import Batch, DecodeRows
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

    def clear(self, at: int = 0) -> None:
        """Forget what was put, up to the mark `at`."""
        self._at = at
        self._full.clear()

    @property
    def mark(self) -> int | None:
        """Up to where the buffer is filled; None where an earlier part of this step lies in another buffer."""
        return None if self._full else self._at

    def part(self, address: int, count: int) -> np.ndarray:
        """The numbers at an address that `put` has given, to be changed in place."""
        start = (address - self._base) // 4
        return self._buffer[start : start + count]

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

    def __init__(self, windows: Sequence[Window], page_size: int) -> None:
        self.windows, self.page_size = windows, page_size
        self.step = library.StepStruct()
        self._ints = IntBuffer()
        self._runs_at = (ctypes.c_void_p * len(windows))()
        self._runs = (ctypes.c_void_p * len(windows))()
        self._adapters = StepAdapters()
        self._last: _LastDecode | None = None
        self.step.mask_sets = len(windows)
        self.step.runs_at, self.step.runs = ctypes.addressof(self._runs_at), ctypes.addressof(self._runs)

    def fill(self, batch: Batch) -> library.StepStruct:
        """The batch's rows, pages and masks, decode rows first; hooks, reads and outputs are the caller's to set."""
        put, step, segments, decode = self._ints.put, self.step, batch.segments, batch.decode
        step.hidden_count = step.query_count = step.reads = step.unfinished = 0
        if self._go_on(batch):
            return step
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
        self._fill_states(batch)
        self._last = self._remember(batch)
        return step

    def _go_on(self, batch: Batch) -> bool:
        """Fill in what changes where the rows are those of the step before, one slot on; False where they are not."""
        last, decode = self._last, batch.decode
        if last is None or batch.segments or decode is None or not last.goes_on(decode):
            return False
        self._ints.clear(last.mark)
        last.tokens[:], last.positions[:], last.write_slots[:] = decode.tokens, decode.positions, decode.write_slots
        for window, ends, runs in zip(self.windows, last.ends, last.runs, strict=True):
            at, pairs = mask_runs(batch, window, self.page_size)
            if not np.array_equal(at, ends):
                return False  # a row attends to more runs of slots than before, or to fewer
            runs[:] = pairs
        return True

    def _remember(self, batch: Batch) -> _LastDecode | None:
        """Where the numbers of plain decode rows lie, for the step after this one."""
        decode, mark, part, step = batch.decode, self._ints.mark, self._ints.part, self.step
        if decode is None or batch.segments or mark is None or not _is_plain(decode):
            return None
        count = len(decode)
        ends = [part(at, count + 1).copy() for at in self._runs_at if at is not None]
        return _LastDecode(
            decode.pages,
            mark,
            part(step.tokens, count),
            part(step.positions, count),
            part(step.write_slots, count),
            ends,
            [part(runs, 2 * at[-1]) for runs, at in zip(self._runs, ends) if runs is not None],
        )

    def _fill_states(self, batch: Batch) -> None:
        """The runs of rows between two recurrent states, sequence by sequence."""
        firsts, runs, decode = [0], [], batch.decode
        if decode is not None and decode.states is not None:
            places = decode.states.tolist()
            firsts += range(1, len(places) + 1)
            runs += [(row, 1, *own) for row, own in enumerate(places)]
        for segment in batch.segments:
            if segment.states is None:
                continue
            row, source, begin = batch.decode_count + segment.rows.start, segment.states.source, 0
            for stop, target in segment.states.saves:
                runs.append((row + begin, stop - begin, source, target))
                begin, source = stop, target
            assert begin == len(segment.rows), "the state after the last row is kept"
            firsts.append(len(runs))
        self.step.sequences = len(firsts) - 1
        self.step.sequence_runs = self.put(firsts)
        self.step.state_runs = self.put([number for run in runs for number in run])

    def put(self, values: Numbers) -> int:
        return self._ints.put(values)


@dataclass(frozen=True, eq=False, slots=True)
class _LastDecode:
    """The decode rows of the last step, which had nothing else, and what changes of them, where it lies."""

    pages: np.ndarray
    mark: int
    tokens: np.ndarray
    positions: np.ndarray
    write_slots: np.ndarray
    ends: list[np.ndarray]  # of each window: where the runs of each row begin
    runs: list[np.ndarray]

    def goes_on(self, rows: DecodeRows) -> bool:
        """Whether rows have the same pages as these, and are as plain."""
        return rows.pages is self.pages and _is_plain(rows)


def _is_plain(rows: DecodeRows) -> bool:
    """Whether rows have neither adapters nor recurrent state."""
    return rows.adapters is None and rows.states is None


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
