"""Pages that several decode rows share, read once for all of them: which rows, and how the work is laid out.

Forks and prompts with a common beginning have the same pages at the start of their tables. Rows and their common pages
are the nodes of a tree: all rows share its root's pages, some of them more.

    rows 0 1 2 3   [ system prompt ]
    rows 0 1                        [ document ]
    row  0                                      its own slots, as those of any other row

It is found anew when the rows are of other sequences, and stays the same from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.attention import SharedKeys
from headway.kernels.triton.attention_parts import ITEM
from headway.runtime.batch import DecodeRows
from headway.runtime.runners.cuda.arrays import Upload

MUCH = 1 << 14  # slots that need not be read again, from which on sharing pays
LEAST = 256  # slots of a node, and of a part
CELLS = 2048  # parts of all rows that there is room for
MOST_PARTS = 32  # of a row
MEMBERS, ITEMS = 4096, 2048  # that there is room for


@dataclass(frozen=True)
class SharedRun:
    """Rows that have the same physical pages at page numbers `begin` to `end` of their tables."""

    rows: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class SharedStep:
    """The shared pages of a step on the device: the parts that each row has, rows by item, and items [n, 5]; and on the
    host where each row's own slots begin."""

    starts: np.ndarray
    counts: Tensor
    members: Tensor
    items: Tensor
    most: int  # parts of a row

    @property
    def key(self) -> tuple[object, ...]:
        """What the kernels are launched by."""
        return ("shared", len(self.items), self.most)


def most_parts(rows: int) -> int:
    """How many parts each of so many rows has room for: a power of two."""
    return min(MOST_PARTS, CELLS // (1 << max(0, rows - 1).bit_length()))


class SharedRoom:
    """Where the parts of rows are put."""

    def __init__(self, heads: int, dim: int, device: torch.device) -> None:
        self._sums = torch.empty(CELLS * heads * dim, dtype=torch.float32, device=device)
        self._peaks = torch.empty(CELLS * heads * 2, dtype=torch.float32, device=device)
        self._heads, self._dim = heads, dim

    def keys(self, step: SharedStep) -> SharedKeys:
        """The room as a step divides it."""
        shape = (CELLS // step.most, self._heads, step.most)
        return SharedKeys(self._sums.view(*shape, self._dim), self._peaks.view(*shape, 2), step.counts, step.most)


def shared_runs(tables: Sequence[np.ndarray], size: int) -> list[SharedRun]:
    """The nodes of the tree, those of a row in order; none where little is shared."""
    found: list[SharedRun] = []
    least = -(-LEAST // size)

    def divide(rows: Sequence[int], begin: int, at: int) -> None:
        """Nodes of rows that have the same pages up to number `at`, and are in nodes up to number `begin`."""
        by_page: dict[int, list[int]] = {}
        for row in rows:
            if len(tables[row]) > at:
                by_page.setdefault(int(tables[row][at]), []).append(row)
        for same in by_page.values():
            if len(same) > 1:
                end = _common([tables[row] for row in same], at)
                is_long = end - begin >= least
                if is_long:
                    found.append(SharedRun(tuple(same), begin, end))
                divide(same, end if is_long else begin, end)

    divide(range(len(tables)), 0, 0)
    saved = sum((len(run.rows) - 1) * (run.end - run.begin) * size for run in found)
    return found if saved >= MUCH else []


def _common(tables: Sequence[np.ndarray], at: int) -> int:
    """The first page number after `at` where these differ, or one of them ends."""
    shortest = min(map(len, tables))
    differ = np.zeros(shortest - at, bool)
    for table in tables[1:]:
        differ |= table[at:shortest] != tables[0][at:shortest]
    return at + int(differ.argmax()) if differ.any() else shortest


@dataclass(frozen=True)
class SharedWork:
    """The same as numbers: where each row's own slots begin, its parts, and items for tiles of so many rows."""

    starts: np.ndarray
    counts: np.ndarray
    members: np.ndarray
    items: np.ndarray


def lay_out_shared(
    runs: Sequence[SharedRun], count: int, size: int, *, tile: int, programs: int, most: int
) -> SharedWork | None:
    """The work of `count` rows for so many programs; None if it has no room."""
    slots = sum(-(-len(run.rows) // tile) * (run.end - run.begin) * size for run in runs)
    length = max(LEAST, -(-slots // programs // LEAST) * LEAST)
    starts, counts = np.zeros(count, np.int64), np.zeros(count, np.int64)
    deepest = np.zeros(count, np.int64)  # slots of each row's nodes
    nodes = np.zeros(count, np.int64)
    for run in runs:
        deepest[list(run.rows)] += (run.end - run.begin) * size
        nodes[list(run.rows)] += 1
    if nodes.max() >= most:
        return None
    while (deepest // length + nodes).max() > most:
        length *= 2
    members: list[int] = []
    items: list[tuple[int, ...]] = []
    for run in runs:
        begin, end, part = run.begin * size, run.end * size, int(counts[run.rows[0]])
        pieces = range(begin, end, length)
        for first in range(0, len(run.rows), tile):
            some = run.rows[first : first + tile]
            where = len(members)
            items += [(where, len(some), at, min(end, at + length), part + i) for i, at in enumerate(pieces)]
            members += some
        starts[list(run.rows)], counts[list(run.rows)] = end, part + len(pieces)
    if len(members) > MEMBERS or len(items) > ITEMS:
        return None
    return SharedWork(starts, counts, np.array(members), np.array(items))


class SharedPages:
    """Finds what the decode rows of a step share, and has it on the device."""

    def __init__(self, device: torch.device, page_size: int, *, tile: int, programs: int, rows: int) -> None:
        self._size, self._tile, self._programs, self._rows = page_size, tile, programs, rows
        self._numbers = Upload(rows + MEMBERS + ITEM * ITEMS, torch.int32, device)
        self._group: object = None
        self._masked: tuple[bool, ...] | None = None
        self._step: SharedStep | None = None

    def find(self, decode: DecodeRows | None) -> SharedStep | None:
        """What the decode rows of a step share, on the device."""
        if decode is None or decode.group is None:
            return None
        masked = None if decode.masks is None else tuple([mask is not None for mask in decode.masks])
        if decode.group is not self._group or masked != self._masked:
            self._group, self._masked = decode.group, masked
            work = self._work(decode, masked)
            self._step = None if work is None else self._send(work, most_parts(len(decode)))
        return self._step

    def _work(self, decode: DecodeRows, masked: tuple[bool, ...] | None) -> SharedWork | None:
        tables = np.split(decode.pages, decode.page_ends[:-1])
        whole = [int(slot) // self._size for slot in decode.slots]  # pages before the one that is written
        if masked is not None:
            whole = [0 if alone else pages for alone, pages in zip(masked, whole, strict=True)]
        runs = shared_runs([table[:pages] for table, pages in zip(tables, whole, strict=True)], self._size)
        if not runs:
            return None
        how = {"tile": self._tile, "programs": self._programs, "most": most_parts(len(tables))}
        return lay_out_shared(runs, len(tables), self._size, **how)

    def _send(self, work: SharedWork, most: int) -> SharedStep:
        """With room for more items, so that few sizes serve all steps."""
        rows, at = self._rows, self._rows + MEMBERS
        count = 1 << max(4, (len(work.items) - 1).bit_length())
        self._numbers.wait()
        host, device = self._numbers.host, self._numbers.device
        host[:rows], host[at : at + ITEM * count] = 0, 0
        host[: len(work.counts)] = work.counts
        host[rows : rows + len(work.members)] = work.members
        host[at : at + work.items.size] = work.items.ravel()
        self._numbers.send(at + ITEM * count)
        return SharedStep(
            starts=work.starts,
            counts=device[:rows],
            members=device[rows:at],
            items=device[at : at + ITEM * count].view(-1, ITEM),
            most=most,
        )
