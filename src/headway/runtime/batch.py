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


def pack(chunks: Sequence[Chunk], edits: tuple[Edit, ...], *, positions: bool = True) -> Batch:
    """The chunks as one batch. Without `positions` its segments do not say at which position id a slot stands."""
    tokens: list[int] = []
    at: list[int] = []
    write_rows: list[int] = []
    write_slots: list[int] = []
    segments = []
    for chunk in chunks:
        first = len(tokens)
        reread = _rereads(chunk)
        if reread:
            tokens.append(chunk.table.tokens[-1])
            at.append(chunk.table.positions[-1])
        write_rows += range(len(tokens), len(tokens) + chunk.stop - chunk.start)
        write_slots += _physical(chunk)
        tokens += chunk.work.tokens[chunk.start : chunk.stop]
        at += chunk.work.positions[chunk.start : chunk.stop]
        segments.append(_segment(chunk, first, reread, positions))
    return Batch(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.array(at, dtype=np.int64),
        write_rows=np.array(write_rows, dtype=np.int64),
        write_slots=np.array(write_slots, dtype=np.int64),
        segments=tuple(segments),
        edits=edits,
    )


def _physical(chunk: Chunk) -> list[int]:
    """The physical slots that the chunk's tokens are written to."""
    size, pages, slots = chunk.table.page_size, chunk.pages, []
    for slot in range(chunk.base + chunk.start, chunk.base + chunk.stop):
        page = pages[slot // size]
        assert page is not None
        slots.append(page * size + slot % size)
    return slots


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


def _segment(chunk: Chunk, first: int, reread: bool, positions: bool) -> Segment:
    work, table, size = chunk.work, chunk.table, chunk.table.page_size
    extra = 1 if reread else 0  # a row ahead of the chunk's own
    slots = np.arange(chunk.base + chunk.start - extra, chunk.base + chunk.stop)
    end = chunk.base + (len(work.tokens) if not work.causal else chunk.stop)
    pages: Sequence[int | None] = chunk.pages[: -(-end // size)]
    numbers: Sequence[int] = range(len(pages))
    if None in pages or (chunk.kept_pages is not None and not reread):
        kept = numbers if chunk.kept_pages is None or reread else chunk.kept_pages
        numbers = [n for n in numbers if n in kept and pages[n] is not None]
        pages = [pages[n] for n in numbers]
    masks = (None,) * (chunk.stop - chunk.start) if work.masks is None else work.masks[chunk.start : chunk.stop]
    readouts = []
    for index, readout in enumerate(work.readouts):
        if readout.row == BEFORE and chunk.start == 0:
            readouts.append((index, first if reread else BEFORE, readout))
        elif chunk.start <= readout.row < chunk.stop:
            readouts.append((index, readout.row - chunk.start + first + extra, readout))
    known = np.array([*table.positions[: chunk.base], *work.positions][:end] if positions else [], dtype=np.int64)
    return Segment(
        rows=range(first, first + len(slots)),
        slots=slots,
        pages=np.array(pages, dtype=np.int64),
        numbers=np.array(numbers, dtype=np.int64),
        masks=(table.masks[-1], *masks) if reread else masks,
        slot_positions=known,
        readouts=tuple(readouts),
        keep_last=chunk.stop == len(work.tokens) and chunk.stop > chunk.start,
        kept=table.state,
        before_position=table.positions[-1] if table.length else -1,
    )
