"""A model of a context: what the dense oracle must see to judge it.

A `Cell` is one computed token with the cells it attended to when it was computed. A `World` is one context's view: the
cells in its slots, the pages that were discarded, the tokens still pending, and the counts its page operations report.
A cell keeps what it saw, so a slot that was cut off lives on in those that attended to it, and forks need no copying:
their lists name the same cells. None of this looks at the package under test; only `Twin`, which moves a context and
its world together, calls it.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch

import headway as hw
from support.checks import assert_close
from support.hf import save_hf, variant, weights_of
from support.oracle import Oracle, Result

Sees = Callable[[int, int], np.ndarray]  # (slot of the row, slots in all) → which slots it may attend to


@dataclass(eq=False)
class Cell:
    """One computed token."""

    token: int
    position: int
    attends: list[Cell] = field(default_factory=list)


@dataclass
class World:
    """One context, as it must be."""

    page_size: int
    windows: tuple[int | None, ...]
    cells: list[Cell] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)  # numbers of discarded pages
    pages: int = 0
    committed: int = 0
    kept: bool = False  # whether the last token's final state is still there

    def fork(self) -> World:
        """A fork: pages without tokens do not come along."""
        used = -(-len(self.cells) // self.page_size)
        return World(
            self.page_size,
            self.windows,
            list(self.cells),
            list(self.pending),
            set(self.gone),
            used,
            self.committed,
            self.kept,
        )

    @property
    def next_position(self) -> int:
        return max((c.position for c in self.cells), default=-1) + 1

    @property
    def working_tokens(self) -> int:
        return len(self.cells) - self.committed * self.page_size

    def live(self, slots: int) -> np.ndarray:
        """Which slots were not discarded [slots]."""
        return np.array([i // self.page_size not in self.gone for i in range(slots)], dtype=bool)

    @property
    def readable(self) -> bool:
        """Whether the last token can be computed again: every cell it attends to stands in a live slot."""
        there = {id(c) for c, live in zip(self.cells, self.live(len(self.cells)), strict=True) if live}
        return self.kept or all(id(c) in there for c in self.cells[-1].attends)

    def place(self, rows: Sequence[int | None]) -> list[int]:
        """Position ids of pending tokens and rows; None is the next one."""
        following, found = self.next_position, []
        for given in [None] * len(self.pending) + list(rows):
            found.append(following if given is None else given)
            following = max(following, found[-1] + 1)
        return found

    def plan(self, tokens: Sequence[int], rows: Sequence[int | None], mask: Choice | None) -> Plan:
        """What a pass with these rows computes, pending tokens first."""
        return Plan(self, [*self.pending, *tokens], self.place(rows), mask)

    def advance(self, plan: Plan, *, commit: bool = True) -> None:
        """The pass succeeded."""
        self.cells += plan.cells
        self.pending = []
        self.pages = max(self.pages, -(-len(self.cells) // self.page_size))
        if commit:
            self.committed = max(self.committed, len(self.cells) // self.page_size)
        if plan.cells:
            self.kept = True

    def cut(self, keep: int) -> None:
        if keep < len(self.cells):
            del self.cells[keep:]
            self.kept = False

    def truncate(self, n: int) -> None:
        waiting = min(n, len(self.pending))
        del self.pending[len(self.pending) - waiting :]
        if n > waiting:
            self.cut(len(self.cells) - (n - waiting))
            self.committed = min(self.committed, len(self.cells) // self.page_size)
            self.pages = -(-len(self.cells) // self.page_size)
            self.gone = {p for p in self.gone if p < self.pages}

    def keep(self, slots: Sequence[int], start: int) -> None:
        """Keep these slots of the tail that begins at `start`, compacted."""
        first, before = start, len(self.cells)
        for slot in slots:
            first += slot == first
        if first == start + len(slots):
            self.truncate(len(self.pending) + before - first) if before > first else None
            return
        deferred = before // self.page_size > self.committed
        self.kept = self.kept and slots[-1] == before - 1
        self.cells = [*self.cells[:start], *(self.cells[slot] for slot in slots)]
        self.gone = {p for p in self.gone if p < first // self.page_size}
        self.pages = -(-len(self.cells) // self.page_size)
        kept = min(self.committed, first // self.page_size)
        self.committed = kept if deferred else len(self.cells) // self.page_size

    def append(self, other: World, pages: Sequence[int], shift: int) -> None:
        """Another context's pages follow, each cell so many positions on."""
        size, deferred = self.page_size, len(self.cells) // self.page_size > self.committed
        chosen = [other.cells[slot] for page in pages for slot in range(page * size, (page + 1) * size)]
        self.cells += copies(chosen, shift)
        self.pages = max(self.pages, -(-len(self.cells) // size))
        if not deferred:
            self.committed = max(self.committed, len(self.cells) // size)
        self.kept = False

    def release(self, n: int) -> None:
        self.pages -= n
        self.gone = {p for p in self.gone if p < self.pages}
        self.cut(min(len(self.cells), self.pages * self.page_size))

    def new_pages(self, tokens: int) -> int:
        """How many pages a pass of so many tokens adds."""
        return max(0, -(-(len(self.cells) + tokens) // self.page_size) - self.pages)


def copies(chosen: Sequence[Cell], shift: int) -> list[Cell]:
    """Cells with the same contents: they attend to copies of what these attend to, all of it so many positions on.

    Attention looks at differences of positions, so moving everything a cell depends on moves its keys and nothing else.
    """
    made: dict[int, Cell] = {}
    waiting = list(chosen)
    while waiting:
        cell = waiting.pop()
        if id(cell) not in made:
            made[id(cell)] = Cell(cell.token, cell.position + shift)
            waiting += cell.attends
            made[id(cell)].attends = list(cell.attends)
    for cell in made.values():
        cell.attends = [made[id(each)] for each in cell.attends]
    found, seen = [], set[int]()
    for cell in chosen:
        if id(cell) in seen:  # twice in one call: a cell of its own
            twice = made[id(cell)]
            found.append(Cell(twice.token, twice.position, [*twice.attends]))
        else:
            found.append(made[id(cell)])
        seen.add(id(cell))
    return found


@dataclass(eq=False)
class Choice:
    """An attention mask: what is handed over, and what it means.

    `sees` is a symbolic rule. `rows` are raw attend bits, one line for each input row over all slots of the pass.
    """

    given: object
    sees: Sees | None = None
    rows: np.ndarray | None = None
    causal: bool = True


class Plan:
    """The cells a pass adds, or the reason why it must be refused."""

    def __init__(self, world: World, tokens: list[int], positions: list[int], mask: Choice | None) -> None:
        self.base, self.pending, self.refused = len(world.cells), len(world.pending), ""
        self.cells = [Cell(t, p) for t, p in zip(tokens, positions, strict=True)]
        self.attend = self._rows(world, mask)  # [rows, slots], pending rows first
        everything = world.cells + self.cells
        for i, row in enumerate(self.attend):
            self.cells[i].attends = [everything[j] for j in np.flatnonzero(row)]
            self._check(world, i)

    def _rows(self, world: World, mask: Choice | None) -> np.ndarray:
        total = self.base + len(self.cells)
        live = world.live(total)
        attend = np.zeros((len(self.cells), total), dtype=bool)
        for i in range(len(self.cells)):
            slot = self.base + i
            before = np.arange(total) <= slot
            waiting = i < self.pending
            if mask is None or (waiting and mask.sees is None):
                attend[i] = before & live
            elif mask.sees is not None:
                causal = waiting or mask.causal
                attend[i, : slot + 1 if causal else total] = mask.sees(slot, slot + 1 if causal else total)
                attend[i] &= live
            else:
                assert mask.rows is not None
                attend[i] = mask.rows[i - self.pending] & (before if mask.causal else True)
                if (attend[i] & ~live).any():
                    self.refused = "a raw row attends to a discarded slot"
        return attend

    def _check(self, world: World, i: int) -> None:
        cell = self.cells[i]
        for window in set(world.windows):
            reach = cell.attends if window is None else [c for c in cell.attends if cell.position - c.position < window]
            if not reach:
                self.refused = f"row {i} attends to nothing in a window of {window}"

    def trimmed(self, world: World) -> int:
        """How many pages no row attends to and none writes: those that page-trim leaves out."""
        size, end = world.page_size, self.base + len(self.cells)
        written = set(range(self.base // size, -(-end // size)))
        count = 0
        for page in range(-(-end // size)):
            seen = self.attend[:, page * size : (page + 1) * size].any()
            count += page not in written and (page in world.gone or not seen)
        return count


class Twin:
    """A context and its world, moved together: every pass is judged."""

    def __init__(self, context: hw.Context, judge: Judge, world: World | None = None) -> None:
        self.context, self.judge = context, judge
        self.world = world or World(context.page_size, judge.oracle.shape.windows)

    def fill(self, tokens: Sequence[int]) -> Twin:
        self.context.fill(tokens)
        self.world.pending += tokens
        return self

    def fork(self) -> Twin:
        return Twin(self.context.fork(), self.judge, self.world.fork())

    def plan(self, tokens: Sequence[int] = (), at: Sequence[int | None] = (), mask: Choice | None = None) -> Plan:
        return self.world.plan(tokens, at or [None] * len(tokens), mask)

    def build(self, tokens: Sequence[int] = (), at: Sequence[int] = (), mask: Choice | None = None) -> hw.Forward:
        forward = self.context.forward()
        if at:
            forward.input_at(tokens, at)
        elif tokens:
            forward.input(tokens)
        if mask is not None:
            forward.attention_mask(mask.given, causal=mask.causal)  # type: ignore[arg-type]
        return forward

    def run(self, tokens: Sequence[int] = (), at: Sequence[int] = (), mask: Choice | None = None) -> hw.Output:
        """One pass; the logits of every row, and of the token before them, equal the oracle's."""
        plan, forward = self.plan(tokens, at, mask), self.build(tokens, at, mask)
        assert not plan.refused, plan.refused
        first = -len(tokens) - (1 if self.world.pending or (self.world.cells and self.world.readable) else 0)
        handles = [forward.probe(i, hw.Logits()) for i in range(first, 0)]
        out = forward.execute().result()
        cells = [*self.world.cells, *plan.cells][first:]
        assert_close(np.stack([out.logits(h) for h in handles]), self.judge.logits(cells))
        self.world.advance(plan)
        return out

    def check(self) -> None:
        """The counts are right."""
        inner, world = self.context.inner(), self.world
        assert (self.context.seq_len, list(self.context.pending)) == (len(world.cells), world.pending)
        assert inner.committed_page_count == world.committed
        assert inner.working_page_count == world.pages - world.committed
        assert inner.working_page_token_count == max(0, world.working_tokens)


# -- the judge -----------------------------------------------------------------------------------------------------


class Judge:
    """The oracle over cells."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def run(self, wanted: Iterable[Cell]) -> tuple[dict[Cell, int], Result]:
        """The dense run of every cell that the wanted ones depend on, and each one's row in it."""
        order: dict[Cell, int] = {}
        waiting = list(wanted)
        while waiting:
            cell = waiting.pop()
            if cell not in order:
                order[cell] = len(order)
                waiting += cell.attends
        attend = np.zeros((len(order), len(order)), dtype=bool)
        for cell, row in order.items():
            attend[row, [order[c] for c in cell.attends]] = True
        tokens, positions = [c.token for c in order], [c.position for c in order]
        return order, self.oracle.run(tokens, positions, torch.from_numpy(attend))

    def logits(self, wanted: Sequence[Cell]) -> np.ndarray:
        """The logits at these cells [n, V], float64."""
        order, result = self.run(wanted)
        return result.logits[[order[c] for c in wanted]].numpy()


@cache
def model(name: str) -> tuple[Path, Judge]:
    """A random model of `support.hf` as a folder, and its judge."""
    config, hf = variant(name)
    folder = tempfile.TemporaryDirectory(prefix="headway-test-")
    atexit.register(folder.cleanup)
    return save_hf(Path(folder.name), hf), Judge(Oracle(config, weights_of(hf), dtype=torch.float64))


# -- symbolic masks, written a second time -------------------------------------------------------------------------


def causal(slot: int, slots: int) -> np.ndarray:
    return np.arange(slots) <= slot


def window(n: int) -> Sees:
    return lambda slot, slots: (np.arange(slots) <= slot) & (np.arange(slots) > slot - n)


def sink(first: int, last: int) -> Sees:
    return lambda slot, slots: (np.arange(slots) < first) | window(last)(slot, slots)


def blocks(lengths: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Sees:
    ends = np.cumsum(lengths)

    def sees(slot: int, slots: int) -> np.ndarray:
        block = np.searchsorted(ends, np.arange(max(slots, slot + 1)), side="right")
        own = int(block[slot])
        if own == len(lengths):
            return np.ones(slots, dtype=bool)
        return np.isin(block[:slots], [own, *(seen for viewer, seen in pairs if viewer == own)])

    return sees


def both(one: Sees, other: Sees) -> Sees:
    return lambda slot, slots: one(slot, slots) & other(slot, slots)


def either(one: Sees, other: Sees) -> Sees:
    return lambda slot, slots: one(slot, slots) | other(slot, slots)


def neither(one: Sees) -> Sees:
    return lambda slot, slots: ~one(slot, slots)


def runs_of(bits: np.ndarray) -> list[int]:
    """Alternating runs of bits, zeros first."""
    found, value = [0], False
    for bit in bits.tolist():
        if bit != value:
            found.append(0)
            value = bit
        found[-1] += 1
    return found
