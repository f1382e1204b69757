"""A streak: a pass that repeats itself. The token it draws is fed to the next one, without the program in between.

The program takes the tokens as it comes for them, and the streak runs up to AHEAD of them. Whoever looks at the context
in between finds what the program has taken: the rest is cut off again. Bookkeeping under the engine's lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headway.base.brle import Brle
from headway.base.masks import Mask
from headway.kv.table import Mark, PageTable
from headway.runtime.passes import Followed, Follower, Pass, Readout

if TYPE_CHECKING:
    from headway.runtime.scheduler.order import Job

AHEAD = 16  # tokens that a streak may be ahead of its program


@dataclass(eq=False, slots=True)
class Streak:
    """How tokens are drawn, how many, and those that the program has not taken yet.

    `base` is the slot of the first token that is fed, and `token` the one to be computed next, behind the table's last.
    The streak is over when it has drawn an end token or all that it was asked for; it begins when the pass before it
    has drawn the first token.
    """

    readout: Readout  # at row 0, without a mask that follows
    mask: Mask | None  # what any row sees; None for all slots up to its own
    ends: frozenset[int]
    left: int  # tokens that may still be drawn
    follower: Follower | None = None  # what binds them, if anything does
    later: Followed | None = None  # the mask for the next one
    base: int = -1
    token: int = 0
    last: int = 0  # the token that the program took last, or the first that was fed
    taken: int = 0
    before: Mark | None = None  # the table when it began
    stamp: object = None  # the table's, as the streak has left it
    drawn: deque[int] = field(default_factory=deque)  # tokens that wait for the program
    over: bool = False
    walks: bool = False  # its next step is an ordinary turn's, not the fleet's (fleet.py)
    straight: bool | None = None  # what `in_line` has found
    quick: bool | None = None  # whether the runner draws so in the fleet, once it is known

    @property
    def begun(self) -> bool:
        return self.base >= 0

    def begin(self, job: Job) -> None:
        """The token that is fed first is known."""
        self.token = self.last = job.work.tokens[0]
        self.base, self.before, self.stamp = job.table.length, job.table.mark(), job.table.stamp
        if self.follower is not None:
            self.later = self.follower.first
        if self.token in self.ends:
            self.over = job.resting = True

    def take(self) -> int | None:
        """The next token for the program, if one is there."""
        if not self.drawn:
            return None
        self.last = self.drawn.popleft()
        self.taken += 1
        return self.last

    def sees(self, slot: int) -> Brle | None:
        """What the token at a slot attends to; None for all up to itself."""
        if self.mask is None:
            return None
        found = self.mask.at(slot)
        return None if found.all() else found

    def in_line(self, table: PageTable) -> bool:
        """Whether it has no masks, and every slot of the table stands at its own position, as those to come will."""
        if self.straight is None:
            self.straight = self.mask is None and table.positions.tolist() == list(range(table.length))
        return self.straight

    def draw(self, job: Job, token: int, mask: Brle | None, state: object = None) -> None:
        """The token behind the table's last was computed, and another one drawn."""
        table = job.table
        page = job.pages.pop(0) if job.pages and table.length == len(table.pages) * table.page_size else None
        table.append(self.token, mask, page, state)
        self.stamp = table.stamp
        job.waited = job.waited_before = 0  # as with a pass of its own for each token
        seen = (self.base + self.taken) // table.page_size  # pages of which the program has taken every token
        if seen > table.committed:
            table.commit_up_to(seen)
        self.token = token
        self.left -= 1
        self.drawn.append(token)
        if self.left == 0 or token in self.ends or (self.later is not None and self.later.sparse):
            self.over = True
        elif self.follower is not None:
            self.later = self.follower.follow(token)
        job.resting = self.over or len(self.drawn) >= AHEAD

    def stops(self, job: Job) -> bool:
        """Whether nothing may follow its last token: then it is over, and what a step draws is in vain."""
        if self.later is None or not self.later.ended:
            return False
        self.over = job.resting = True
        return True

    def wake(self, job: Job) -> bool:
        """The program has taken some: whether the streak is to go on, after it rested."""
        if job.resting and not self.over and len(self.drawn) <= AHEAD // 2:
            job.resting = False
            return True
        return False

    def pass_for(self, table: PageTable) -> Pass:
        """The next step as an ordinary pass."""
        mask = self.sees(table.length)
        readout = self.readout if self.later is None else replace(self.readout, later=self.later)
        return Pass((self.token,), (table.next_position,), None if mask is None else (mask,), (readout,))

    def cut(self, table: PageTable) -> None:
        """Take back what the program has not taken: its last token is the next to be computed again.

        A table that somebody has changed since, which can be when the streak has failed, is left alone.
        """
        assert self.before is not None
        self.drawn.clear()
        if table.closed or table.stamp is not self.stamp:
            return
        if self.taken == 0:
            if table.length > self.base:
                table.rewind(self.before)
            return
        table.truncate(table.length - self.base - self.taken)
        if table.length // table.page_size > table.committed:
            table.commit_up_to(table.length // table.page_size)
