"""A round: one ordinary pass over the last token and the drafts after it, with a draw at every row.

    sites   0: the last token    1: draft 0    2: draft 1    3: draft 2
    draws     5 = draft 0          9 = draft 1   4 ≠ draft 2   —
    kept      5                    9             4: drawn, so it is the next token; draft 2 leaves no slot

A draw depends on its seed, its position and the tokens before it, all of which are those that decoding would have: a
draft that equals the draw changes nothing, and after one that does not, nothing is used. Drafts are cut off in the
moment in which the pass succeeds, under the engine's lock, so that nobody ever sees one that was not kept.

The drafts of a tree are rows of the same pass: each attends to the sequence and its own ancestors, at the position of
its depth. The slots of the path that was kept then move to where decoding would have put them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.specs.masks import logit_mask
from headway.kv.moves import Compaction, keep_slots
from headway.kv.table import PageTable
from headway.models.quantized.cpu import QuantizedDecoder
from headway.program.constraints.constraint import Constraint
from headway.program.generation.draws import Drawing
from headway.program.generation.speculation.drafter import Draft
from headway.program.generation.speculation.rejection import Rejection
from headway.program.generation.steps import ProbeHandles, probed
from headway.program.generation.transcript import Transcript
from headway.program.output import Output

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.execution import Execution
    from headway.program.forward import Forward


@dataclass(eq=False)
class Site:
    """A row where a token may be drawn: the one before the drafts, or a draft. `path` are the drafts up to it."""

    path: tuple[int, ...] = ()
    above: tuple[int, ...] = ()  # the sites of the path
    children: dict[int, int] = field(default_factory=dict)  # draft → site
    chance: np.ndarray | None = None  # the distribution that the draft was drawn from [V]
    allowed: np.ndarray | None = None  # what the constraint allows after it [V]
    draws: bool = True  # otherwise something else than a draw decides what follows
    draw: int | None = None  # the readout that draws its token
    probe: ProbeHandles = None


class Round:
    """The drafts of one pass that the constraint allows, and what became of them."""

    def __init__(
        self, context: Context, drawing: Drawing, transcript: Transcript, draft: Draft, *, rejects: bool = False
    ) -> None:
        self._drawing, self._transcript, self._engine = drawing, transcript, context.engine
        self._table: PageTable = context._table
        self._pages = len(self._table.pages)
        self._sites = [Site()]
        self._kept: list[int] = []  # the sites of drafts that were drawn
        self._error: Exception | None = None
        self._rejection: Rejection | None = None
        self.tokens: list[int] = []  # what the round adds
        self.computed = 0  # the first of them that have their slots
        self.before = self._table.length + len(context._pending)  # tokens before its drafts
        draft = draft if draft.is_line or self._takes_trees() else _first_line(draft)
        self._visit(0, -1, draft, _children(draft))
        self._first = self.before  # the slot of the first draft
        if rejects and drawing.sampler.temperature > 0:
            self._rejection = Rejection(drawing, context.tokens, context.next_position - 1)
        self._forward = self._build(context) if len(self) else None

    def __len__(self) -> int:
        """How many drafts the pass has."""
        return len(self._sites) - 1

    @property
    def accepted(self) -> int:
        """How many of them were kept."""
        return len(self._kept)

    @property
    def can_be_followed(self) -> bool:
        """Whether the tokens that it draws are all that decides how the next round draws."""
        alike = self._drawing.is_alike(len(self._transcript.generated))
        return alike and self._is_line and self._rejection is None and self._transcript.constraint is None

    @property
    def ends(self) -> bool:
        """Whether it has failed, or drawn what ends the text."""
        return self._error is not None or not self._drawing.end_ids.isdisjoint(self.tokens)

    # -- before the pass -------------------------------------------------------------------------------------------

    def _takes_trees(self) -> bool:
        """Whether a draft may stand in another slot than decoding would put it in. Else the first line is drafted."""
        table = self._table
        reserved = table.working > -(-table.working_tokens // table.page_size)
        plain = self._drawing.attention is None and not table.has_discards and not reserved
        # Where activations are quantized, a sum in another order is more than rounding.
        decoder = self._engine._backend.decoder
        quantized = isinstance(decoder, QuantizedDecoder) and decoder.is_quantized
        return plain and not quantized and not self._engine.deterministic

    def _visit(self, at: int, node: int, draft: Draft, children: Mapping[int, list[int]]) -> None:
        """Add the drafts that may follow a site, depth first, with the constraint a token further for each."""
        constraint, site = self._transcript.constraint, self._sites[at]
        if constraint is not None and (bits := constraint.mask()) is not None:
            site.allowed = logit_mask(self._engine.vocab_size, bits)
        for i in children.get(node, ()):
            token = draft.tokens[i]
            if token in self._drawing.end_ids or (site.allowed is not None and not site.allowed[token]):
                continue  # it ends the text, or cannot come
            if constraint is not None and not _accepts(constraint, token):
                continue
            number = site.children[token] = len(self._sites)
            chance = None if draft.probabilities is None else draft.probabilities[i]
            child = Site((*site.path, token), (*site.above, number), chance=chance)
            self._sites.append(child)
            try:
                child.draws = self._continues()
                if child.draws:
                    self._visit(number, i, draft, children)
            except HeadwayError:  # whoever gets there gets the error
                child.draws = False
            finally:
                if constraint is not None:
                    constraint.rollback(1)

    def _continues(self) -> bool:
        """Whether a draw decides what follows the last draft, not the constraint alone."""
        rule = self._transcript.rule
        return rule.active is None or not (rule.finished or rule.forced())

    @property
    def _is_line(self) -> bool:
        return all(len(site.above) == number for number, site in enumerate(self._sites))

    def _build(self, context: Context) -> Forward:
        drawing, generated, tree = self._drawing, self._transcript.generated, not self._is_line
        forward = context.forward()._under(drawing.adapter).defer_commit()
        tokens = [site.path[-1] for site in self._sites[1:]]
        if not tree:
            forward.input(tokens)
        else:
            first = context.next_position
            forward.input_at(tokens, [first + len(site.path) - 1 for site in self._sites[1:]])
            forward.attention_mask(_tree_rows([site.above for site in self._sites[1:]], self._first))
        if drawing.attention is not None:
            forward.attention_mask(drawing.attention)
        rows = [(i - len(self._sites), site) for i, site in enumerate(self._sites) if site.draws]  # the first: -(n + 1)
        alike = self._rejection is None and not any(site.allowed is not None for _, site in rows)
        if alike and drawing.is_alike(len(generated)):
            first = forward.sample([row for row, _ in rows], drawing.sampler).first
            for draw, (_, site) in enumerate(rows, first):
                site.draw = draw
            return forward
        for row, site in rows:
            how: dict[str, Any] = {"row": row, "drafts": site.path}
            after = [*generated, *site.path]
            handle, site.probe = drawing.read(forward, after, site.allowed, **how, tree=tree)
            site.draw = handle.first
            if self._rejection is not None and site.children:
                self._rejection.read(forward, row + len(self._sites), after, site.allowed, **how)
        return forward

    def execute(self) -> Execution[Output]:
        """Submit the pass."""
        assert self._forward is not None
        self._forward._then = self._settle
        return self._forward.execute()

    # -- as it succeeds --------------------------------------------------------------------------------------------

    def _settle(self, values: Mapping[int, object]) -> None:
        """Keep the drafts that were drawn, and cut the others off. On the worker's thread, so it must not raise."""
        try:
            at = 0
            while (draw := self._sites[at].draw) is not None:
                site = self._sites[at]
                token = values[draw]
                if self._rejection is not None and site.children:
                    drafts = [(draft, self._sites[child].chance) for draft, child in site.children.items()]
                    token = self._rejection.choose(values, at, len(site.path), drafts)
                assert isinstance(token, int)
                self.tokens.append(token)
                if token not in site.children:
                    break
                at = site.children[token]
                self._kept.append(at)
        except Exception as error:
            self._error, self._kept, self.tokens = error, [], []
        try:
            self._keep_slots(self._table)
        except Exception as error:
            self._error = error
        self._engine._loop.counters.drafted += len(self)
        self._engine._loop.counters.accepted += self.accepted

    def _keep_slots(self, table: PageTable) -> None:
        """Drop the slots of other drafts, and the pages that only they needed; the full pages before are committed."""
        in_place = next((i for i, site in enumerate(self._kept) if site != i + 1), len(self._kept))
        slots = [self._first + site - 1 for site in self._kept]
        plan = Compaction.of(table, slots, self._first) if in_place < len(slots) else None
        if plan is not None and plan.needed <= table.allocator.available:
            keep_slots(table, plan, exact=False)
            self.computed = len(slots)
        else:  # without pages to copy to, the others are computed again
            self.computed = in_place
            if surplus := len(self) - in_place:
                table.truncate_working(surplus)
        needed = max(self._pages, -(-table.length // table.page_size))
        if needed < len(table.pages):
            table.release(len(table.pages) - needed)
        table.commit_up_to(table.length // table.page_size)

    # -- after it --------------------------------------------------------------------------------------------------

    def add_to(self, context: Context, added: list[int], *, is_in_place: bool) -> int | None:
        """Put its tokens into transcript and, unless they are there, context, up to what ends the text, and into
        `added`; returns the end token among them. The caller holds the lock, and whatever is raised, context and
        `added` agree."""
        try:
            for token in self.tokens:
                if token in self._drawing.end_ids:
                    return token
                self._transcript.add(token)
                added.append(token)
                if self._transcript.stopped:
                    break
        finally:
            if not is_in_place:
                context.truncate(max(0, self.computed - len(added)))
                context.fill(added[self.computed :])
        return None

    def probes(self, out: Output) -> list[tuple[Any, ...]]:
        """What the probe has read for each token that the round adds."""
        if self._error is not None:
            raise self._error
        return [probed(out, self._sites[at].probe) for at in (0, *self._kept)][: len(self.tokens)]


def _children(draft: Draft) -> dict[int, list[int]]:
    """The drafts that follow each draft, and -1."""
    children: dict[int, list[int]] = {}
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    for i, parent in enumerate(parents):
        children.setdefault(parent, []).append(i)
    return children


def _first_line(draft: Draft) -> Draft:
    """The first draft, the first one after it, and so on."""
    children, line, at = _children(draft), list[int](), -1
    while at in children:
        at = children[at][0]
        line.append(at)
    chances = None if draft.probabilities is None else [draft.probabilities[i] for i in line]
    return Draft([draft.tokens[i] for i in line], None, chances, draft.kind, draft.chance)


def _tree_rows(above: Sequence[tuple[int, ...]], first: int) -> list[list[int]]:
    """What each draft attends to, as runs: all slots before the first draft, and the drafts that lead to it."""
    rows = []
    for i, path in enumerate(above):
        seen = [0 if site in path else 1 for site in range(1, i + 2)]  # 0 = attend
        runs = [len(list(group)) for _, group in groupby([0, *seen])]
        runs[0] += first - 1
        rows.append(runs)
    return rows


def _accepts(constraint: Constraint, token: int) -> bool:
    """Whether a constraint takes a token that its mask allows; a program's own may not."""
    try:
        constraint.accept(token)
    except HeadwayError:
        return False
    return True
