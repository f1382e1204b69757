"""Run-ahead decoding: a sequence that feeds itself. The token it samples is its next input; the program need not ask.

The program takes tokens from a bounded buffer; the sequence is at most RUN_AHEAD tokens ahead of it. Whoever looks at
the context in between sees what the program has taken: the rest is cut off again. Bookkeeping under the engine's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass
from headway.base.specs.adapters import AdapterMix
from headway.base.specs.brle import Brle
from headway.base.specs.masks import Mask
from headway.base.specs.samplers import Sampling
from headway.kv.table import Mark, PageTable
from headway.runtime.adjustments import Adjustments
from headway.runtime.passes import ConstraintCursor, DecodeMask, Pass, Readout

if TYPE_CHECKING:
    from headway.runtime.job import Job

RUN_AHEAD = 16  # tokens that may wait in the buffer


@dataclass(eq=False, slots=True)
class Decode:
    """How tokens are sampled, how many, and those that the program has not taken yet.

    `base` is the slot of the first token that is fed, and `token` the next one to compute, after the table's last. It
    is over when it has sampled an end token or all that it was asked for. It begins when the pass before it has
    sampled its first token.
    """

    readout: Readout  # at row 0, without an async mask
    probes: tuple[Readout, ...]  # what else is read of it
    mask: Mask | None  # what any row attends to; None for all slots up to its own
    end_ids: frozenset[int]
    left: int  # tokens that may still be sampled
    constraint: ConstraintCursor | None = None
    adapters: AdapterMix | None = None  # what its tokens are computed under
    adjustments: Adjustments | None = None  # of the next token, if it has a bias or penalties
    logit_mask: DecodeMask | None = None  # of the next token, if a constraint binds it
    base: int = -1
    token: int = 0
    last: int = 0  # the token that the program took last, or the first that was fed
    taken: int = 0
    before: Mark | None = None  # the table when it began
    stamp: object = None  # the table's, as this sequence has left it
    buffer: deque[int] = field(default_factory=deque)  # tokens that wait for the program
    values: deque[Sequence[object]] = field(default_factory=deque)  # of their probes, if there are any
    last_values: Sequence[object] = ()  # those of the token that the program took last
    over: bool = False
    as_pass: bool = False  # its next token is computed as an ordinary pass, because a decode row failed or cannot be
    in_order: bool | None = None  # cached result of `positions_in_order`
    fast: bool | None = None  # whether the runner can sample like this in a decode row, once it is known

    @property
    def begun(self) -> bool:
        return self.base >= 0

    @property
    def looks_back(self) -> bool:
        """Whether a token must be known before the next one can be drawn."""
        return self.constraint is not None or (self.adjustments is not None and self.adjustments.penalizes)

    def begin(self, job: Job) -> None:
        """The first token to feed is known."""
        self.token = self.last = job.work.tokens[0]
        self.base, self.before, self.stamp = job.table.length, job.table.mark(), job.table.stamp
        first = job.work.readouts[0]
        if isinstance(first.what, Sampling) and (first.what.penalizes or first.what.bias):
            self.adjustments = Adjustments(first)
        if self.constraint is not None:
            self.logit_mask = self.constraint.first
        if self.token in self.end_ids:
            self.over = job.resting = True

    def take(self) -> int | None:
        """The next token for the program, if there is one."""
        if not self.buffer:
            return None
        self.last = self.buffer.popleft()
        if self.probes:
            self.last_values = self.values.popleft()
        self.taken += 1
        return self.last

    def attends(self, slot: int) -> Brle | None:
        """What the token at a slot attends to; None for all slots up to its own."""
        if self.mask is None:
            return None
        row = self.mask.at(slot)
        return None if row.all() else row

    def positions_in_order(self, table: PageTable) -> bool:
        """Whether there is no mask and every slot's position id is its slot number, as those to come will be."""
        if self.in_order is None:
            self.in_order = self.mask is None and table.positions.tolist() == list(range(table.length))
        return self.in_order

    def append(
        self, job: Job, token: int, mask: Brle | None, state: object = None, values: Sequence[object] = ()
    ) -> None:
        """The token after the table's last was computed, another one sampled, and `values` probed."""
        table = job.table
        page = job.pages.pop(0) if job.pages and table.length == len(table.pages) * table.page_size else None
        table.append(self.token, mask, page, state, self.adapters)
        self.stamp = table.stamp
        job.waited = job.waited_before = 0  # as if every token were a pass of its own
        complete = (self.base + self.taken) // table.page_size  # pages of which the program has taken every token
        if complete > table.committed:
            table.commit_up_to(complete)
        self.token = token
        if self.adjustments is not None:
            self.adjustments.add(token)
        self.left -= 1
        self.buffer.append(token)
        if self.probes:
            self.values.append(values)
        if self.left == 0 or token in self.end_ids or (self.logit_mask is not None and self.logit_mask.sparse):
            self.over = True
        elif self.constraint is not None:
            self.logit_mask = self.constraint.advance(token)
        job.resting = self.over or len(self.buffer) >= RUN_AHEAD

    def cannot_continue(self, job: Job) -> bool:
        """Whether the constraint allows nothing after the last token: then it is over, and a sampled token is void."""
        if self.logit_mask is None or not self.logit_mask.ended:
            return False
        self.over = job.resting = True
        return True

    def finish(self, job: Job) -> None:
        """No token is wanted after the one in flight."""
        self.left = min(self.left, int(job.running))
        if self.left == 0:
            self.over = job.resting = True

    def wake(self, job: Job) -> bool:
        """The program has taken tokens: whether the sequence goes on after it rested."""
        if job.resting and not self.over and len(self.buffer) <= RUN_AHEAD // 2:
            job.resting = False
            return True
        return False

    def next_pass(self, table: PageTable) -> Pass:
        """The next token as an ordinary pass."""
        mask = self.attends(table.length)
        readout = self.readout if self.adjustments is None else self.adjustments.counted(self.readout)
        if self.logit_mask is not None:
            readout = replace(readout, async_mask=self.logit_mask)
        masks, adapters = None if mask is None else (mask,), None if self.adapters is None else (self.adapters,)
        return Pass((self.token,), (table.next_position,), masks, (readout, *self.probes), adapters=adapters)

    def cut(self, table: PageTable) -> None:
        """Take back what the program has not taken: its last token is the next to be computed again.

        A table that somebody else has changed, which can happen after a failure, is left alone.
        """
        assert self.before is not None
        self.buffer.clear()
        self.values.clear()
        if table.closed or table.stamp is not self.stamp:
            return
        if self.taken == 0:
            if table.length > self.base:
                table.rewind(self.before)
            return
        table.truncate(table.length - self.base - self.taken)
        if table.length // table.page_size > table.committed:
            table.commit_up_to(table.length // table.page_size)
