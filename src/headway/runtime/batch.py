"""The Batch: chunks of passes packed for one step, as flat arrays. Made under the lock, frozen, run by the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.base.brle import Brle
from headway.base.probes import AttentionScores, Hidden, LogitLens, Probe
from headway.base.samplers import Sampling
from headway.kv.allocator import Edit
from headway.kv.table import PageTable
from headway.runtime.passes import BEFORE, Pass, Readout


@dataclass(frozen=True, eq=False)
class Segment:
    """The rows of one pass in a step.

    `rows` is where they stand in the batch, `slots` [R] their place in the sequence. `pages` [P] are the physical
    pages attention reads, `numbers` [P] their place in the sequence. `masks` has what each row attends to, None for
    every live slot up to its own; `slot_positions` the position id of every slot. `kept` is the residual of the token
    before the pass when a readout wants it and the device still has it.
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


@dataclass(frozen=True, eq=False)
class Batch:
    """Everything one step needs. Rows [W] in `write_rows` have their keys and values kept at `write_slots` [W]."""

    tokens: np.ndarray
    positions: np.ndarray
    write_rows: np.ndarray
    write_slots: np.ndarray
    segments: tuple[Segment, ...]
    edits: tuple[Edit, ...]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens start to stop of a pass whose sequence begins at slot `base`; `pages` is its whole table."""

    work: Pass
    table: PageTable
    pages: Sequence[int | None]
    base: int
    start: int
    stop: int
    kept_pages: frozenset[int] | None  # page numbers attention needs; None for all


def pack(chunks: Sequence[Chunk], edits: tuple[Edit, ...]) -> Batch:
    """The chunks as one batch."""
    tokens: list[int] = []
    positions: list[int] = []
    write_rows: list[int] = []
    write_slots: list[int] = []
    segments = []
    for chunk in chunks:
        first = len(tokens)
        reread = _rereads(chunk)
        if reread:
            tokens.append(chunk.table.tokens[-1])
            positions.append(chunk.table.positions[-1])
        tokens.extend(chunk.work.tokens[chunk.start : chunk.stop])
        positions.extend(chunk.work.positions[chunk.start : chunk.stop])
        size = chunk.table.page_size
        slots = np.arange(chunk.base + chunk.start - (1 if reread else 0), chunk.base + chunk.stop)
        for row, slot in enumerate(slots[1 if reread else 0 :], first + (1 if reread else 0)):
            page = chunk.pages[slot // size]
            assert page is not None
            write_rows.append(row)
            write_slots.append(page * size + slot % size)
        segments.append(_segment(chunk, first, slots, reread))
    return Batch(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        write_rows=np.array(write_rows, dtype=np.int64),
        write_slots=np.array(write_slots, dtype=np.int64),
        segments=tuple(segments),
        edits=edits,
    )


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
    if chunk.start > 0:
        return False
    wanted = [r for r in chunk.work.readouts if r.row == BEFORE]
    return any(chunk.table.state is None or not reads_final_state(r.what) for r in wanted)


def reads_final_state(what: Sampling | Probe) -> bool:
    """Whether the final residual of its row is all that a sampler or probe looks at."""
    return not isinstance(what, AttentionScores | Hidden | LogitLens)


def _segment(chunk: Chunk, first: int, slots: np.ndarray, reread: bool) -> Segment:
    work, size = chunk.work, chunk.table.page_size
    end = chunk.base + (len(work.tokens) if not work.causal else chunk.stop)
    wanted = range(-(-end // size))
    if chunk.kept_pages is not None and not reread:
        wanted = [n for n in wanted if n in chunk.kept_pages]
    numbers = [n for n in wanted if chunk.pages[n] is not None]
    masks: list[Brle | None] = [chunk.table.masks[-1]] if reread else []
    masks += [work.mask(i) for i in range(chunk.start, chunk.stop)]
    offset = first + (1 if reread else 0) - chunk.start  # pass row → batch row
    readouts = []
    for index, readout in enumerate(work.readouts):
        if readout.row == BEFORE and chunk.start == 0:
            readouts.append((index, first if reread else BEFORE, readout))
        elif chunk.start <= readout.row < chunk.stop:
            readouts.append((index, readout.row + offset, readout))
    positions = np.concatenate(
        [np.array(chunk.table.positions[: chunk.base], dtype=np.int64), np.array(work.positions, dtype=np.int64)]
    )[:end]
    return Segment(
        rows=range(first, first + len(slots)),
        slots=slots,
        pages=np.array([chunk.pages[n] for n in numbers], dtype=np.int64),
        numbers=np.array(numbers, dtype=np.int64),
        masks=tuple(masks),
        slot_positions=positions,
        readouts=tuple(readouts),
        keep_last=chunk.stop == len(work.tokens) and chunk.stop > chunk.start,
        kept=chunk.table.state,
        before_position=chunk.table.positions[-1] if chunk.table.length else -1,
    )
