"""A batch's numbers on their way to the device: laid out as kernels/triton/layout says, copied in one piece.

The worker fills the host's buffer, and waits before it does until the copy of what was there has been made.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.attention import Window
from headway.kernels.triton import layout
from headway.runtime.batch import Batch, Segment
from headway.runtime.runners.mask_runs import Numbers, Runs, mask_runs


class StreamPoint:
    """A point in the stream's work that the host can wait for, without waiting for what was launched after it."""

    def __init__(self, device: torch.device) -> None:
        on_device = device.type == "cuda"
        self._event = torch.cuda.Event() if on_device else None
        self._stream = torch.cuda.current_stream(device) if on_device else None  # the runner's; looking it up is slow

    def record(self) -> None:
        if self._event is not None:
            self._event.record(self._stream)

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Upload:
    """A buffer in pinned host memory and its twin on the device; `grow` replaces both.

    A copy is made when the stream gets there, so whoever writes into `host` calls `wait` first.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._where = dtype, device
        self._sent = StreamPoint(device)
        self.grow(count)

    def wait(self) -> None:
        """Until the last copy has been made."""
        self._sent.wait()

    def grow(self, count: int) -> None:
        pinned = self._where.type == "cuda"
        self._host = torch.empty(count, dtype=self._dtype, pin_memory=pinned)
        self.host: np.ndarray = self._host.numpy()
        self.device: Tensor = torch.empty(count, dtype=self._dtype, device=self._where)
        self._last: np.ndarray | None = None  # what was `put` there

    def __len__(self) -> int:
        return len(self.host)

    def send(self, count: int) -> None:
        """Copy the first `count` numbers, in the order of the stream."""
        self.device[:count].copy_(self._host[:count], non_blocking=True)
        self._sent.record()

    def put(self, numbers: np.ndarray) -> None:
        """Have these be the first numbers on the device. Where they are already, as from step to step they often are,
        the device is not kept waiting for a copy."""
        flat = numbers.ravel()
        if self._last is not None and np.array_equal(self._last, flat):
            return
        self.wait()
        self.host[: len(flat)] = flat
        self.send(len(flat))
        self._last = flat.copy()


class PinnedBuffer:
    """Pinned host memory for numbers that come back from the device."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._host = torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._arrived = StreamPoint(device)

    def send(self, numbers: Tensor) -> None:
        """Copy the numbers, in the order of the stream."""
        self._host[: len(numbers)].copy_(numbers, non_blocking=True)
        self._arrived.record()

    def read(self, count: int) -> list[int]:
        """The first numbers, once they have come."""
        self._arrived.wait()
        return self._host[:count].tolist()


@dataclass(frozen=True, eq=False)
class StepNumbers:
    """What follows a step's columns: the pages of decode rows, page tables of segments, the runs of each mask set."""

    segments: tuple[Segment, ...]  # those that have rows
    decode_pages: np.ndarray
    tables: list[np.ndarray]
    runs: list[tuple[np.ndarray, np.ndarray]]  # where each row's runs begin [T + 1]; their ends, flat

    def __len__(self) -> int:
        tables = len(self.decode_pages) + sum(len(t) for t in self.tables)
        return tables + sum(len(pairs) for _, pairs in self.runs)


NO_PAGES = np.empty(0, np.int64)


@dataclass(frozen=True)
class StepInts:
    """Lays out the numbers of steps for a model's windows. Decode rows come before the rows of segments."""

    windows: tuple[Window, ...]
    page_size: int

    @property
    def columns(self) -> int:
        return layout.columns(len(self.windows))

    def read(self, batch: Batch, starts: np.ndarray | None = None) -> StepNumbers:
        """What a batch's rows read and attend to; with `starts`, decode rows without masks from these slots on."""
        used = tuple([s for s in batch.segments if len(s.rows)])
        runs = [mask_runs(batch, window, self.page_size) for window in self.windows]
        if starts is not None:
            assert self.windows == (None,)
            runs = [_begun(*runs[0], starts)]
        return StepNumbers(
            segments=used,
            decode_pages=NO_PAGES if batch.decode is None else batch.decode.pages,
            tables=[_table(s) for s in used],
            runs=[(np.asarray(at), np.asarray(pairs)) for at, pairs in runs],
        )

    def size(self, numbers: StepNumbers, rows: int) -> int:
        """How many numbers a step of this many rows takes."""
        return self.columns * rows + len(numbers)

    def fill(self, host: np.ndarray, batch: Batch, numbers: StepNumbers, rows: int) -> int:
        """Write a step of `rows` rows, those after the batch's own empty. Returns how many numbers it has."""
        first, count, decode = batch.decode_count, batch.rows, batch.decode
        head = host[: self.columns * rows].reshape(self.columns, rows)
        head[:, count:] = 0
        head[layout.WRITE] = -1
        head[layout.TOKEN, first:count], head[layout.POSITION, first:count] = batch.tokens, batch.positions
        head[layout.WRITE, first + batch.write_rows] = batch.write_slots
        at = self.columns * rows
        if decode is not None:
            head[layout.TOKEN, :first], head[layout.POSITION, :first] = decode.tokens, decode.positions
            head[layout.WRITE, :first] = decode.write_slots
            head[layout.PAGE_AT, 0] = at
            head[layout.PAGE_AT, 1:first] = at + decode.page_ends[:-1]
            head[layout.WHOLE, :first] = 1
            host[at : at + len(decode.pages)] = decode.pages
            at += len(decode.pages)
        if count > first:
            at = _put_tables(host, head[:, first:count], numbers, at)
        for i, (where, pairs) in enumerate(numbers.runs):
            at = _put_runs(host, head[layout.run_field(i) :, :count], where, pairs, at)
        return at


def _put_tables(host: np.ndarray, columns: np.ndarray, numbers: StepNumbers, at: int) -> int:
    """Write the page tables of segments from `at` on, and their rows' columns; returns where they end."""
    sizes = [len(t) for t in numbers.tables]
    starts = np.cumsum([at, *sizes])
    whole = np.array([len(s.pages) == size for s, size in zip(numbers.segments, sizes, strict=True)])
    host[at : starts[-1]] = np.concatenate(numbers.tables)
    at, starts = int(starts[-1]), starts[:-1]
    if columns.shape[1] > len(sizes):
        lengths = [len(s.rows) for s in numbers.segments]
        starts, whole = np.repeat(starts, lengths), np.repeat(whole, lengths)
    columns[layout.PAGE_AT], columns[layout.WHOLE] = starts, whole
    return at


def _put_runs(host: np.ndarray, columns: np.ndarray, where: np.ndarray, pairs: np.ndarray, at: int) -> int:
    """Write a set of masks from `at` on, and its columns; where it ends."""
    first, end = 2 * where[:-1], 2 * where[1:]
    columns[layout.RUN_AT] = at + first
    columns[layout.RUN_COUNT] = (end - first) // 2
    some = slice(None) if (first < end).all() else first < end
    columns[layout.FIRST] = columns[layout.END] = 0  # of a row that sees nothing
    columns[layout.FIRST, some] = pairs[first[some]]
    columns[layout.END, some] = pairs[end[some] - 1]
    host[at : at + len(pairs)] = pairs
    return at + len(pairs)


def _begun(at: Numbers, pairs: Numbers, starts: np.ndarray) -> Runs:
    """The runs of rows, of which those whose start is not 0 have one that begins there."""
    pairs, (rows,) = np.array(pairs), np.nonzero(starts)
    pairs[2 * np.asarray(at)[rows]] = starts[rows]
    return at, pairs


def even(count: int) -> int:
    """The next multiple of 16. Triton compiles a kernel once more for sizes and addresses that are none."""
    return -(-count // 16) * 16


def _table(segment: Segment) -> np.ndarray:
    """The physical page of every page number, 0 for one that is not read."""
    pages, numbers = segment.pages, segment.numbers
    if not len(numbers) or int(numbers[-1]) == len(numbers) - 1:
        return pages
    table = np.zeros(int(numbers[-1]) + 1, np.int64)
    table[numbers] = pages
    return table
