"""The Batch: chunks of passes packed for one step, as flat arrays. Made under the lock, frozen, run by the worker.

Packing stands between the end of one step and the start of the next, so a row of it must be cheap: a table's
pages are an array that is made once, and the values made for every row are named tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from headway.base.brle import Brle
from headway.base.probes import AttentionScores, Hidden, LogitLens, Probe
from headway.base.samplers import Sampling
from headway.kv.allocator import Edit
from headway.kv.table import PageTable
from headway.runtime.passes import BEFORE, Pass, Readout

NO_POSITIONS = np.empty(0, dtype=np.int64)


class Segment(NamedTuple):
    """The rows of one pass in a step.

    `rows` is where they stand in the batch, `slots` [R] their place in the sequence. `pages` [P] are the physical
    pages attention reads, `numbers` [P] their place in the sequence. `masks` has what each row attends to, None for
    every live slot up to its own; `slot_positions` the position id of every slot, if asked for. `kept` is the residual
    of the token before the pass when a readout wants it and the device still has it.
    """

    rows: range
    slots: np.ndarray
    pages: np.ndarray
    numbers: np.ndarray
    masks: tuple[Brle | None, ...]
    slot_positions: np.ndarray
    readouts: tuple[tuple[int, int, Readout], ...]  # (index in the pass, row in the batch or BEFORE, what)
    keep_last: bool
    kept: object
    before_position: int  # of the token before the pass; -1 when there is none


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Everything one step needs. Rows [W] in `write_rows` have their keys and values kept at `write_slots` [W]."""

    tokens: np.ndarray
    positions: np.ndarray
    write_rows: np.ndarray
    write_slots: np.ndarray
    segments: tuple[Segment, ...]
    edits: tuple[Edit, ...]


class Chunk(NamedTuple):
    """Tokens start to stop of a pass whose sequence begins at slot `base`.

    `pages` [P] is its whole table, 0 where a page was discarded; `kept_pages` the numbers of those attention needs,
    None for all.
    """

    work: Pass
    table: PageTable
    pages: np.ndarray
    base: int
    start: int
    stop: int
    kept_pages: frozenset[int] | None


def pack(chunks: Sequence[Chunk], edits: tuple[Edit, ...], *, positions: bool = True) -> Batch:
    """The chunks as one batch. Without `positions` its segments do not say at which position id a slot stands."""
    tokens: list[int] = []
    at: list[int] = []
    slots: list[int] = []
    write_rows: list[int] = []
    write_slots: list[int] = []
    places = []
    for chunk in chunks:
        work, table, _, base, start, stop, _ = chunk
        first = len(tokens)
        reread = start == 0 and _rereads(chunk)
        if reread:
            tokens.append(table.tokens[-1])
            at.append(table.positions[-1])
            slots.append(base - 1)
        places.append((first, reread))
        write_rows += range(len(tokens), len(tokens) + stop - start)
        write_slots += _physical(chunk)
        tokens += work.tokens[start:stop]
        at += work.positions[start:stop]
        slots += range(base + start, base + stop)
    where = np.array(slots, dtype=np.int64)
    return Batch(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.array(at, dtype=np.int64),
        write_rows=np.array(write_rows, dtype=np.int64),
        write_slots=np.array(write_slots, dtype=np.int64),
        segments=tuple(
            [_segment(c, first, reread, where, positions) for c, (first, reread) in zip(chunks, places, strict=True)]
        ),
        edits=edits,
    )


def _physical(chunk: Chunk) -> list[int]:
    """The physical slots that the chunk's tokens are written to."""
    size, begin, end = chunk.table.page_size, chunk.base + chunk.start, chunk.base + chunk.stop
    if end - begin == 1:  # a decode
        return [int(chunk.pages[begin // size]) * size + begin % size]
    slots = np.arange(begin, end)
    return (chunk.pages[slots // size] * size + slots % size).tolist()


def needed_pages(work: Pass, base: int, size: int) -> frozenset[int] | None:
    """The page numbers that some row of the pass attends to or writes; None when no row has a mask."""
    if not work.masks or any(m is None for m in work.masks):
        return None
    end = base + len(work.tokens)
    needed = set(range(base // size, -(-end // size)))
    for mask in work.masks:
        assert mask is not None
        for start, stop in mask.intervals():
            needed.update(range(start // size, (stop - 1) // size + 1))
    return frozenset(needed)


def _rereads(chunk: Chunk) -> bool:
    """Whether the token before the pass must be computed again (without writing) to be read."""
    for readout in chunk.work.readouts:
        if readout.row == BEFORE and (chunk.table.state is None or not reads_final_state(readout.what)):
            return True
    return False


def reads_final_state(what: Sampling | Probe) -> bool:
    """Whether the final residual of its row is all that a sampler or probe looks at."""
    return not isinstance(what, AttentionScores | Hidden | LogitLens)


def _segment(chunk: Chunk, first: int, reread: bool, slots: np.ndarray, positions: bool) -> Segment:
    work, table, _, base, start, stop, _ = chunk
    last = first + stop - start + (1 if reread else 0)  # the token before is a row ahead of the chunk's own
    whole = len(work.tokens)
    end = base + (stop if work.causal else whole)
    pages, numbers = _seen(chunk, -(-end // table.page_size), reread)
    masks = (None,) * (stop - start) if work.masks is None else work.masks[start:stop]
    return Segment(
        rows=range(first, last),
        slots=slots[first:last],
        pages=pages,
        numbers=numbers,
        masks=(table.masks[-1], *masks) if reread else masks,
        slot_positions=_positions(chunk, end) if positions else NO_POSITIONS,
        readouts=_asked(chunk, first, reread),
        keep_last=stop == whole and stop > start,
        kept=table.state,
        before_position=table.positions[-1] if table.length else -1,
    )


def _seen(chunk: Chunk, count: int, reread: bool) -> tuple[np.ndarray, np.ndarray]:
    """The pages that attention reads among the first `count`, and their numbers."""
    pages, kept = chunk.pages[:count], None if reread else chunk.kept_pages
    if kept is None and not chunk.table.has_discards:
        return pages, _first(len(pages))
    numbers = np.flatnonzero(pages)
    if kept is not None:
        numbers = numbers[[n in kept for n in numbers.tolist()]]
    return pages[numbers], numbers


@lru_cache(maxsize=1024)
def _first(count: int) -> np.ndarray:
    """The first numbers from 0, in an array that nobody writes to."""
    return np.arange(count)


def _asked(chunk: Chunk, first: int, reread: bool) -> tuple[tuple[int, int, Readout], ...]:
    """The readouts of the chunk's rows, with where they stand in the batch."""
    start, stop, at = chunk.start, chunk.stop, first + (1 if reread else 0) - chunk.start
    found = []
    for index, readout in enumerate(chunk.work.readouts):
        row = readout.row
        if start <= row < stop:
            found.append((index, row + at, readout))
        elif row == BEFORE and start == 0:
            found.append((index, first if reread else BEFORE, readout))
    return tuple(found)


def _positions(chunk: Chunk, end: int) -> np.ndarray:
    """The position id of every slot up to `end`."""
    known, base = np.empty(end, dtype=np.int64), chunk.base
    known[:base] = chunk.table.positions[:base]
    known[base:] = chunk.work.positions[: end - base]
    return known
