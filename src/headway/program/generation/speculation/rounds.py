"""A round: one ordinary pass over the last token and the drafts after it, with a draw at every row.

    sites   0: the last token    1: draft 0    2: draft 1    3: draft 2
    draws     5 = draft 0          9 = draft 1   4 ≠ draft 2   —
    kept      5                    9             4: drawn, so it is the next token; draft 2 leaves no slot

A draw depends on its seed, its position and the tokens before it, all of which are those that decoding would have: a
draft that equals the draw changes nothing, and after one that does not, nothing is used. Drafts are cut off in the
moment in which the pass succeeds, under the engine's lock, so that nobody ever sees one that was not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.errors import HeadwayError
from headway.base.masks import logit_mask
from headway.kv.table import PageTable
from headway.program.constraints.constraint import Constraint
from headway.program.generation.draws import Drawing
from headway.program.generation.speculation.drafter import Draft
from headway.program.generation.steps import ProbeHandles, probed
from headway.program.generation.transcript import Transcript
from headway.program.output import Output, SampleHandle

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.forward import Execution, Forward


@dataclass(eq=False)
class Site:
    """A row where a token may be drawn: the one before the drafts, or a draft. `path` are the drafts up to it."""

    path: tuple[int, ...] = ()
    parent: int = -1  # a site
    children: dict[int, int] = field(default_factory=dict)  # draft → site
    allowed: np.ndarray | None = None  # what the constraint allows after it [V]
    draws: bool = True  # otherwise something else than a draw decides what follows
    token: SampleHandle | None = None
    probe: ProbeHandles = None


class Round:
    """The drafts of one pass that the constraint allows, and what became of them."""

    def __init__(self, context: Context, drawing: Drawing, transcript: Transcript, draft: Draft) -> None:
        self._drawing, self._transcript = drawing, transcript
        self._vocab = context.engine.vocab_size
        self._counters = context.engine._loop.counters
        self._sites = [Site()]
        children: dict[int, list[int]] = {}
        parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
        for i, parent in enumerate(parents):
            children.setdefault(parent, []).append(i)
        self._visit(self._sites[0], -1, draft, children)
        self._forward = self._build(context) if len(self) else None
        self._pages = len(context._table.pages)
        self._table: PageTable = context._table
        self._kept: list[Site] = []  # drafts that were drawn
        self._error: Exception | None = None
        self.tokens: list[int] = []  # what the round adds

    def __len__(self) -> int:
        """How many drafts the pass has."""
        return len(self._sites) - 1

    @property
    def accepted(self) -> int:
        """How many of them were kept."""
        return len(self._kept)

    # -- before the pass -------------------------------------------------------------------------------------------

    def _visit(self, site: Site, at: int, draft: Draft, children: Mapping[int, list[int]]) -> None:
        """Add the drafts that may follow a site, depth first, with the constraint a token further for each."""
        constraint = self._transcript.constraint
        if constraint is not None and (bits := constraint.mask()) is not None:
            site.allowed = logit_mask(self._vocab, bits)
        for i in children.get(at, ()):
            token = draft.tokens[i]
            if token in self._drawing.end_ids or (site.allowed is not None and not site.allowed[token]):
                continue  # it ends the text, or cannot come
            if constraint is not None and not _accepts(constraint, token):
                continue
            child = Site((*site.path, token), self._sites.index(site))
            site.children[token] = len(self._sites)
            self._sites.append(child)
            try:
                child.draws = self._continues()
                if child.draws:
                    self._visit(child, i, draft, children)
            except HeadwayError:  # whoever gets there gets the error
                child.draws = False
            finally:
                if constraint is not None:
                    constraint.rollback(1)

    def _continues(self) -> bool:
        """Whether a draw decides what follows the last draft, not the constraint alone."""
        transcript = self._transcript
        return transcript.constraint is None or not (transcript.finished or transcript.forced())

    def _build(self, context: Context) -> Forward:
        drawing, generated = self._drawing, self._transcript.generated
        forward = context.forward().defer_commit().input([site.path[-1] for site in self._sites[1:]])
        forward._under(drawing.adapter)
        if drawing.attention is not None:
            forward.attention_mask(drawing.attention)
        for i, site in enumerate(self._sites):
            if site.draws:
                row = i - len(self._sites)  # counted from the end: the first one is just before the drafts
                after = [*generated, *site.path]
                site.token, site.probe = drawing.read(forward, after, site.allowed, row=row, drafts=site.path)
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
            site = self._sites[0]
            while site.token is not None:
                token = values[site.token.first]
                assert isinstance(token, int)
                self.tokens.append(token)
                if token not in site.children:
                    break
                site = self._sites[site.children[token]]
                self._kept.append(site)
            self._cut(self._table, len(self) - len(self._kept))
            self._counters.drafted += len(self)
            self._counters.accepted += len(self._kept)
        except Exception as error:
            self._error = error

    def _cut(self, table: PageTable, surplus: int) -> None:
        """Drop the last tokens of the pass and the pages only they needed; the full pages before are committed."""
        if surplus:
            table.truncate_working(surplus)
            needed = max(self._pages, -(-table.length // table.page_size))
            if needed < len(table.pages):
                table.release(len(table.pages) - needed)
        table.commit_up_to(table.length // table.page_size)

    # -- after it --------------------------------------------------------------------------------------------------

    def probes(self, out: Output) -> list[tuple[Any, ...]]:
        """What the probe has read for each token that the round adds."""
        if self._error is not None:
            raise self._error
        sites = [self._sites[0], *self._kept]
        return [probed(out, site.probe) for site in sites[: len(self.tokens)]]


def _accepts(constraint: Constraint, token: int) -> bool:
    """Whether a constraint takes a token that its mask allows; a program's own may not."""
    try:
        constraint.accept(token)
    except HeadwayError:
        return False
    return True
