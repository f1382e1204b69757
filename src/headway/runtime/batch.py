"""The Batch: decode rows and chunks of passes for one step, as flat arrays. Made under the lock, frozen.

A chunk is laid out while the device computes the step before, where its pass is known by then. Packing stands between
two steps, so it only puts chunks side by side: tokens that the last step sampled, and where each row stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from headway.base.arrays import joined_numbers
from headway.base.dataclass import dataclass
from headway.base.specs.adapters import AdapterMix, Mixes
from headway.base.specs.brle import Brle
from headway.base.specs.probes import AttentionScores, Hidden, LogitLens, Probe
from headway.base.specs.samplers import Sampling
from headway.kv.states import StateCheckpoint
from headway.kv.table import PageTable
from headway.runtime.adjustments import Adjustments
from headway.runtime.passes import BEFORE, Pass, Readout

NO_POSITIONS = np.empty(0, dtype=np.int64)


class SegmentStates(NamedTuple):
    """Where the recurrent state of a segment's rows comes from and goes to, as places of the state pool.

    `saves` has (rows, place): after the first `rows` rows of the segment the state is kept there. The last one is after
    all rows.
    """

    source: int
    saves: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, slots=True)
class ChunkStates:
    """The same as checkpoints: `saves` has (tokens of the pass, checkpoint), ascending."""

    source: StateCheckpoint
    saves: tuple[tuple[int, StateCheckpoint], ...]


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
    adapters: Mixes | None = None  # what each row is computed under; None: no row has an adapter
    before_adapter: AdapterMix | None = None  # what the token before the pass was computed under
    states: SegmentStates | None = None  # of a model with recurrent layers

    def mix_of(self, row: int) -> AdapterMix | None:
        """What a row of the batch, or the token before the pass, is computed under."""
        if row == BEFORE:
            return self.before_adapter
        return None if self.adapters is None else self.adapters[row - self.rows.start]


@dataclass(frozen=True, eq=False, slots=True)
class DecodeRows:
    """One row each of N decoding sequences, as flat arrays [N], and how each samples its next token.

    A token below 0 is one that the step in flight samples and the host does not know yet: -1 - i for its decode row i.
    `pages` are the sequences' whole page tables side by side, ending at `page_ends`; `slots` is where each row stands
    in its own sequence.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    write_slots: np.ndarray
    pages: np.ndarray
    page_ends: np.ndarray
    masks: tuple[Brle | None, ...] | None  # None: every row attends to all slots up to its own
    readouts: tuple[Readout, ...]
    seeds: np.ndarray  # of the readouts, uint64
    adapters: Mixes | None = None  # as in Segment
    probes: tuple[tuple[Readout, ...], ...] | None = None  # what else is read of each row; None: nothing
    states: np.ndarray | None = None  # [N, 2] places of the recurrent state before and after each row, if there is one
    adjustments: tuple[Adjustments | None, ...] | None = None  # bias and penalties of each row's draw; None: nowhere
    group: object = None  # the same object while rows are of the same sequences, each one slot on

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Everything one step computes: decode rows, and chunks of passes as segments.

    The arrays hold the rows of the segments [T]; `write_rows` [W] are those whose keys and values are kept, at the
    physical slots `write_slots` [W]. Decode rows come first where a runner puts both into one forward pass.
    """

    tokens: np.ndarray
    positions: np.ndarray
    write_rows: np.ndarray
    write_slots: np.ndarray
    segments: tuple[Segment, ...]
    decode: DecodeRows | None = None

    @property
    def decode_count(self) -> int:
        return 0 if self.decode is None else len(self.decode)

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return len(self.tokens) + self.decode_count

    @property
    def adapters(self) -> Mixes | None:
        """What each row of the forward pass is computed under, decode rows first; None: no row has an adapter.

        From step to step the same decode rows alone give the same object.
        """
        if self.decode is not None and not self.segments:
            return self.decode.adapters
        parts = [*([] if self.decode is None else [(len(self.decode), self.decode.adapters)])]
        parts += [(len(segment.rows), segment.adapters) for segment in self.segments]
        if all(adapters is None for _, adapters in parts):
            return None
        mixes: list[AdapterMix | None] = []
        for rows, adapters in parts:
            mixes += [None] * rows if adapters is None else adapters
        return mixes

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are kept."""
        return len(self.write_rows) + self.decode_count


@dataclass(eq=False, slots=True)
class Chunk:
    """Tokens `start` to `stop` of a pass whose sequence begins at slot `base`, laid out for a step.

    All but the tokens of `work` is known before the pass that samples them ends; `work` is replaced when they come.
    `table_pages` [P] is its whole table, 0 where a page was discarded; `pages` are those that attention reads and
    `numbers` their place. With `reread` the token before the pass is a row of its own, ahead of the others. `rows_read`
    has (index in the pass, row of the chunk or BEFORE) for every readout. The first `unwritten` tokens have their keys
    and values already: they are computed again for the recurrent state alone, which `states` says when a step has it.
    """

    work: Pass
    table: PageTable
    table_pages: np.ndarray
    base: int
    start: int
    stop: int
    reread: bool
    write_slots: Sequence[int] | np.ndarray
    pages: np.ndarray
    numbers: np.ndarray
    masks: tuple[Brle | None, ...]
    rows_read: tuple[tuple[int, int], ...]
    before_position: int
    adapters: Mixes | None
    unwritten: int = 0
    states: ChunkStates | None = None

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its pass."""
        return self.stop == len(self.work.tokens)


def lay_out(
    work: Pass,
    table: PageTable,
    pages: np.ndarray,
    *,
    base: int,
    part: tuple[int, int],
    kept: frozenset[int] | None,
    before_position: int,
    written_from: int = 0,
) -> Chunk:
    """Tokens (start, stop) of a pass on these pages. `kept` has the numbers that attention needs, None for all; slots
    before `written_from` have their keys and values."""
    start, stop = part
    reread = start == 0 and rereads(work, table)
    unwritten = max(0, min(stop, written_from - base) - start)
    end = base + (stop if work.causal else len(work.tokens))
    seen, numbers = _seen(pages[: -(-end // table.page_size)], table, None if reread else kept)
    masks = (None,) * (stop - start) if work.masks is None else work.masks[start:stop]
    return Chunk(
        work=work,
        table=table,
        table_pages=pages,
        base=base,
        start=start,
        stop=stop,
        reread=reread,
        write_slots=_physical(pages, table.page_size, base + start + unwritten, base + stop),
        pages=seen,
        numbers=numbers,
        masks=(table.masks[-1], *masks) if reread else masks,
        rows_read=_rows_read(work, start, stop, reread),
        before_position=before_position,
        adapters=_adapters(work, table, start, stop, reread),
        unwritten=unwritten,
    )


def pack(chunks: Sequence[Chunk], decode: DecodeRows | None = None, *, positions: bool = True) -> Batch:
    """Chunks and decode rows as one batch. Without `positions` its segments do not have the position ids of slots."""
    tokens: list[Sequence[int]] = []
    at: list[Sequence[int]] = []
    slots: list[Sequence[int]] = []
    write_rows: list[Sequence[int]] = []
    write_slots: list[Sequence[int] | np.ndarray] = []
    firsts, count = [], 0
    for chunk in chunks:
        work, table, start, stop = chunk.work, chunk.table, chunk.start, chunk.stop
        firsts.append(count)
        if chunk.reread:
            tokens.append((table.tokens[-1],))
            at.append((table.positions[-1],))
            count += 1
        write_rows.append(range(count + chunk.unwritten, count + stop - start))
        write_slots.append(chunk.write_slots)
        tokens.append(work.tokens[start:stop])
        at.append(work.positions[start:stop])
        slots.append(range(chunk.base + start - chunk.reread, chunk.base + stop))
        count += stop - start
    where = joined_numbers(slots)
    return Batch(
        tokens=joined_numbers(tokens),
        positions=joined_numbers(at),
        write_rows=joined_numbers(write_rows),
        write_slots=joined_numbers(write_slots),
        segments=tuple([_segment(c, first, where, positions) for c, first in zip(chunks, firsts, strict=True)]),
        decode=decode,
    )


def _physical(pages: np.ndarray, size: int, begin: int, end: int) -> Sequence[int] | np.ndarray:
    """The physical slots of slots `begin` to `end` of a sequence."""
    if end - begin == 1:  # a decode
        return [int(pages[begin // size]) * size + begin % size]
    slots = np.arange(begin, end)
    return pages[slots // size] * size + slots % size


def joined(pages: np.ndarray, more: Sequence[int]) -> np.ndarray:
    """A table's pages and those that follow them."""
    return np.concatenate((pages, np.array(more, dtype=np.int64))) if more else pages


def needed_pages(work: Pass, base: int, size: int) -> frozenset[int] | None:
    """The page numbers that some row of the pass attends to or writes; None when no row has a mask."""
    if not work.masks or any(m is None for m in work.masks):
        return None
    return needed_of([m for m in work.masks if m is not None], base, base + len(work.tokens), size)


def needed_of(masks: Sequence[Brle], begin: int, end: int, size: int) -> frozenset[int]:
    """The page numbers that one of these masks attends to, and those of the slots that are written."""
    needed = set(range(begin // size, -(-end // size)))
    for mask in masks:
        for start, stop in mask.intervals():
            needed.update(range(start // size, (stop - 1) // size + 1))
    return frozenset(needed)


def rereads(work: Pass, table: PageTable) -> bool:
    """Whether the token before the pass must be computed again (without writing) to be read."""
    for readout in work.readouts:
        if readout.row == BEFORE and (table.state is None or not reads_final_state(readout.what)):
            return True
    return False


def reads_final_state(what: Sampling | Probe) -> bool:
    """Whether the final residual of its row is all that a sampler or probe looks at."""
    return not isinstance(what, AttentionScores | Hidden | LogitLens)


def _adapters(work: Pass, table: PageTable, start: int, stop: int, reread: bool) -> Mixes | None:
    """What a chunk's rows are computed under: the token before the pass as its slot was."""
    before = table.adapters[-1] if reread else None
    if work.adapters is None and before is None:
        return None
    mixes = (None,) * (stop - start) if work.adapters is None else work.adapters[start:stop]
    return (before, *mixes) if reread else mixes


def _segment(chunk: Chunk, first: int, slots: np.ndarray, positions: bool) -> Segment:
    last, readouts = first + len(chunk.masks), chunk.work.readouts
    return Segment(
        rows=range(first, last),
        slots=slots[first:last],
        pages=chunk.pages,
        numbers=chunk.numbers,
        masks=chunk.masks,
        slot_positions=_positions(chunk) if positions else NO_POSITIONS,
        readouts=tuple([(i, BEFORE if row == BEFORE else first + row, readouts[i]) for i, row in chunk.rows_read]),
        keep_last=chunk.is_last and chunk.stop > chunk.start,
        kept=chunk.table.state,
        before_position=chunk.before_position,
        adapters=chunk.adapters,
        before_adapter=chunk.table.adapters[-1] if chunk.table.length else None,
        states=None if chunk.states is None else _places(chunk.states, chunk.start - chunk.reread),
    )


def _places(states: ChunkStates, first: int) -> SegmentStates:
    """The places of a chunk's states; `first` is the token of its first row."""
    return SegmentStates(states.source.place, tuple([(stop - first, save.place) for stop, save in states.saves]))


def _seen(pages: np.ndarray, table: PageTable, kept: frozenset[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """The pages that attention reads among these, and their numbers."""
    if kept is None and not table.has_discards:
        return pages, _first(len(pages))
    if kept is None:
        numbers = np.flatnonzero(pages)
        return pages[numbers], numbers
    numbers = np.array(sorted([n for n in kept if n < len(pages)]), dtype=np.int64)  # few of many: no look at the rest
    seen = pages[numbers]
    return (seen[seen > 0], numbers[seen > 0]) if table.has_discards else (seen, numbers)


@lru_cache(maxsize=1024)
def _first(count: int) -> np.ndarray:
    """The first numbers from 0, in an array that nobody writes to."""
    return np.arange(count)


def _rows_read(work: Pass, start: int, stop: int, reread: bool) -> tuple[tuple[int, int], ...]:
    """The readouts of a chunk's rows, with where they stand among them."""
    at = (1 if reread else 0) - start
    rows = []
    for index, readout in enumerate(work.readouts):
        row = readout.row
        if start <= row < stop:
            rows.append((index, row + at))
        elif row == BEFORE and start == 0:
            rows.append((index, 0 if reread else BEFORE))
    return tuple(rows)


def _positions(chunk: Chunk) -> np.ndarray:
    """The position id of every slot up to the last that the chunk's rows may see."""
    work, base = chunk.work, chunk.base
    count = chunk.stop if work.causal else len(work.tokens)
    known = np.empty(base + count, dtype=np.int64)
    known[:base] = chunk.table.positions[:base]
    known[base:] = work.positions[:count]
    return known
