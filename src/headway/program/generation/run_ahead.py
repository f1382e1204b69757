"""What a generation has ahead of its program: a pass that is fed with a token nobody has read yet, or a streak of them.

Between two steps it can be taken back at any time: the context does so when somebody looks at it. A grammar that binds
the pass has moved on with it, and goes back then.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import ContextBusy
from headway.base.masks import Mask
from headway.program.constraints.async_mask import DENSE, AsyncGrammarMasks, AsyncLogitMask
from headway.program.constraints.constraint import GrammarMatcher
from headway.program.generation.steps import Prepared, Turn
from headway.program.generation.transcript import Transcript
from headway.runtime.scheduler.decode import Streak
from headway.runtime.scheduler.order import Job

if TYPE_CHECKING:
    from headway.program.context import Context

# A grammar is followed ahead of the program where it leaves much open: from the start, or for so many tokens in
# succession. Elsewhere forced tokens are near, and they come sooner in one pass with the token before them.
CALM = 8


class Ahead:
    """At most one pass, which may repeat itself, and the masks of the grammar that binds it."""

    def __init__(self, context: Context, said: Transcript, ends: frozenset[int], calm: int | None = None) -> None:
        self._context, self._said, self._ends = context, said, ends
        self._turn: Turn | None = None
        self._later: AsyncLogitMask | None = None  # its mask, when a grammar is followed
        self._follower: AsyncGrammarMasks | None = None  # those of a streak
        self._calm = calm  # tokens in succession behind which the grammar left much open; None: look when it matters

    def fork(self, context: Context, said: Transcript) -> Ahead:
        """Nothing is ahead of a fork; what is known of the grammar comes along."""
        return Ahead(context, said, self._ends, self._calm)

    @property
    def is_there(self) -> bool:
        return self._turn is not None

    @property
    def has_grammar(self) -> bool:
        """A streak moves the grammar on, so that it says nothing about the program's last token."""
        return self._follower is not None

    @property
    def fed(self) -> int:
        """The last token that the program has: what the pass was fed with, or what came of a streak."""
        streak = self._streak
        return self._said.generated[-1] if streak is None else streak.last

    @property
    def _streak(self) -> Streak | None:
        return None if self._turn is None else self._turn.execution.job.streak

    def check_idle(self) -> None:
        """Raise while a step is on its way: the pass ahead then follows one whose token nobody has yet."""
        with self._context.engine.lock:
            if self._turn is not None and self._context.retract is None:
                raise ContextBusy("this generation has a step on its way; await it before steering the generation")

    # -- setting it going ------------------------------------------------------------------------------------------

    def can_follow(self) -> bool:
        """Whether what binds the next token can be computed beside the device."""
        constraint = self._said.constraint
        if constraint is None:
            return True
        if self._calm is None:  # its mask was computed just now, for the pass that this one would follow
            self._calm = CALM if self._is_open() else 0
        return self._calm >= CALM

    def mask(self) -> AsyncLogitMask | None:
        """The mask for the pass that will be ahead, where a grammar is followed."""
        constraint, vocab = self._said.constraint, self._context.engine.vocab_size
        self._later = AsyncLogitMask(constraint, self._ends, vocab) if isinstance(constraint, GrammarMatcher) else None
        return self._later

    def start(self, prepared: Prepared) -> None:
        """Queue a pass that is fed with the token of the one before."""
        self._turn = prepared.execute()

    def keep_going(self, attention: Mask | None, left: int) -> None:
        """It takes nothing but its token: it repeats itself from now on, `left` times at most."""
        assert self._turn is not None
        engine, job, constraint = self._context.engine, self._turn.execution.job, self._said.constraint
        if isinstance(constraint, GrammarMatcher):
            assert self._later is not None
            self._follower = AsyncGrammarMasks(self._later, constraint, self._ends, engine.vocab_size)
        readout = replace(job.work.readouts[0], later=None)
        engine.loop.keep_going(job, Streak(readout, attention, self._ends, left, self._follower))

    # -- the step that it makes ------------------------------------------------------------------------------------

    def claim(self) -> Turn | None:
        """The pass, if there is one; from now on nobody takes it back."""
        with self._context.engine.lock:
            self.check_idle()
            turn = self._turn
            if turn is not None:
                self._turn = self._context.retract = None
            return turn

    def follow(self) -> tuple[Job | None, int | None]:
        """The streak, if it is one, and its next token, if that is there.

        From now on nobody takes the streak back, until the step is made.
        """
        with self._context.engine.lock:
            job = None if self._turn is None else self._turn.execution.job
            if job is None or job.streak is None:
                return None, None
            self.check_idle()
            self._context.retract = None
            return job, self._context.engine.loop.taken(job)

    async def coming(self, job: Job) -> int | None:
        """The next token of a streak, when it is there; None when it has ended without one."""
        engine, loop = self._context.engine, asyncio.get_running_loop()
        while True:
            with engine.lock:
                token = engine.loop.taken(job)
                if token is not None or (job.streak is not None and job.streak.over):
                    job.waiters.clear()  # nobody is woken for tokens that are not waited for
                    return token
                if job.outcome.done():
                    break
                waiter = loop.create_future()
                job.waiters[:] = [(loop, waiter)]
            await waiter
        job.outcome.result()
        raise AssertionError("a streak has no result")

    def is_untouched(self) -> bool:
        """Whether the context is as the streak has left it."""
        streak, context = self._streak, self._context
        return streak is not None and context.table.stamp is streak.stamp and not context.pending

    @property
    def is_spent(self) -> bool:
        """Whether no token of the streak is left, and none will come."""
        streak = self._streak
        return streak is not None and streak.over and not streak.drawn

    # -- the grammar -----------------------------------------------------------------------------------------------

    def has_accepted(self) -> bool:
        """Whether the grammar has taken the token that was taken from the streak just now."""
        return self._follower is not None and self._streak is not None and self._follower.tokens > self._streak.taken

    def accepts(self) -> bool:
        """Whether the grammar has taken the token, drawn just now, that the pass is fed with."""
        later, self._later = self._later, None
        return later is not None and later.wait()

    def observe(self) -> None:
        """The program has one token more: whether the grammar leaves much open behind it."""
        if self._follower is None:  # else the grammar is busy elsewhere
            self._calm = (self._calm or 0) + 1 if self._is_open() else 0

    def _is_open(self) -> bool:
        return isinstance(self._said.constraint, GrammarMatcher) and self._said.constraint.mask_density >= DENSE

    # -- taking it back --------------------------------------------------------------------------------------------

    def take_back(self) -> None:
        """Have neither the pass nor anything that came of it and was not taken."""
        streak, turn, follower = self._streak, self._turn, self._follower
        self._turn = self._later = self._follower = self._context.retract = None
        if turn is not None:
            turn.execution.cancel()
        if follower is not None and streak is not None:
            follower.cut(1 + streak.taken - (streak.taken > 0 and streak.last in self._ends))
            self._calm = None

    def undone(self) -> None:
        """The pass before it was undone, and it went with that: so does the grammar."""
        later, follower = self._later, self._follower
        self._turn = self._later = self._follower = None
        if follower is not None:
            follower.cut(0)
        elif later is not None and later.wait() and self._said.constraint is not None:
            self._said.constraint.rollback(1)
