"""What a generation has in flight ahead of its program: a pass fed with an unread token, or run-ahead decoding.

Between two steps it can be taken back at any time: the context does so when somebody looks at it. A grammar that binds
the tokens has moved on with them, and is rolled back then.
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
from headway.runtime.decode import Decode
from headway.runtime.job import Job

if TYPE_CHECKING:
    from headway.program.context import Context

# A grammar is followed ahead of the program where it leaves much open: from the start, or for so many tokens in
# succession. Elsewhere forced tokens are near, and they come sooner in one pass with the token before them.
CALM = 8


class Lookahead:
    """At most one pass, which may continue as a decoding sequence, and the masks of the grammar that binds it."""

    def __init__(self, context: Context, said: Transcript, ends: frozenset[int], calm: int | None = None) -> None:
        self._context, self._said, self._ends = context, said, ends
        self._turn: Turn | None = None
        self._later: AsyncLogitMask | None = None  # its mask, when a grammar is followed
        self._follower: AsyncGrammarMasks | None = None  # those of a decoding sequence
        self._calm = calm  # tokens in succession behind which the grammar left much open; None: look when it matters

    def fork(self, context: Context, said: Transcript) -> Lookahead:
        """Nothing is ahead of a fork; what is known of the grammar comes along."""
        return Lookahead(context, said, self._ends, self._calm)

    @property
    def is_there(self) -> bool:
        return self._turn is not None

    @property
    def has_grammar(self) -> bool:
        """Whether run-ahead decoding has moved the grammar past the program's last token."""
        return self._follower is not None

    @property
    def fed(self) -> int:
        """The last token that the program has: what the pass was fed with, or what was taken from the buffer."""
        decode = self._decode
        return self._said.generated[-1] if decode is None else decode.last

    @property
    def _decode(self) -> Decode | None:
        return None if self._turn is None else self._turn.execution._job.decode

    def check_idle(self) -> None:
        """Raise while a step is in flight: the pass ahead then follows one whose token nobody has yet."""
        with self._context.engine._lock:
            if self._turn is not None and self._context._retract is None:
                raise ContextBusy("this generation has a step in flight; await it before steering the generation")

    # -- setting it going ------------------------------------------------------------------------------------------

    def can_follow(self) -> bool:
        """Whether what binds the next token can be computed concurrently with the device."""
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

    def decode(self, attention: Mask | None, left: int) -> None:
        """It takes nothing but its token: let it continue by itself, for at most `left` tokens."""
        assert self._turn is not None
        engine, job, constraint = self._context.engine, self._turn.execution._job, self._said.constraint
        if isinstance(constraint, GrammarMatcher):
            assert self._later is not None
            self._follower = AsyncGrammarMasks(self._later, constraint, self._ends, engine.vocab_size)
        readout = replace(job.work.readouts[0], async_mask=None)
        engine._loop.decode(job, Decode(readout, attention, self._ends, left, self._follower))

    # -- the step that it makes ------------------------------------------------------------------------------------

    def claim(self) -> Turn | None:
        """The pass, if there is one; from now on nobody takes it back."""
        with self._context.engine._lock:
            self.check_idle()
            turn = self._turn
            if turn is not None:
                self._turn = self._context._retract = None
            return turn

    def follow(self) -> tuple[Job | None, int | None]:
        """The decoding sequence, if it is one, and its next token, if there is one.

        From now on nobody takes it back, until the step is made.
        """
        with self._context.engine._lock:
            job = None if self._turn is None else self._turn.execution._job
            if job is None or job.decode is None:
                return None, None
            self.check_idle()
            self._context._retract = None
            return job, self._context.engine._loop.next_token(job)

    async def coming(self, job: Job) -> int | None:
        """The next token of a decoding sequence, when it is there; None if it has ended without one."""
        engine, loop = self._context.engine, asyncio.get_running_loop()
        while True:
            with engine._lock:
                token = engine._loop.next_token(job)
                if token is not None or (job.decode is not None and job.decode.over):
                    job.waiters.clear()  # nobody is woken for tokens that nobody waits for
                    return token
                if job.outcome.done():
                    break
                waiter = loop.create_future()
                job.waiters[:] = [(loop, waiter)]
            await waiter
        job.outcome.result()
        raise AssertionError("a decoding sequence has no result")

    def is_untouched(self) -> bool:
        """Whether the context is as the decoding sequence has left it."""
        decode, context = self._decode, self._context
        return decode is not None and context._table.stamp is decode.stamp and not context.pending

    @property
    def is_spent(self) -> bool:
        """Whether the buffer is empty and no token will come."""
        decode = self._decode
        return decode is not None and decode.over and not decode.buffer

    # -- the grammar -----------------------------------------------------------------------------------------------

    def has_accepted(self) -> bool:
        """Whether the grammar has accepted the token that was just taken from the buffer."""
        return self._follower is not None and self._decode is not None and self._follower.tokens > self._decode.taken

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
        decode, turn, follower = self._decode, self._turn, self._follower
        self._turn = self._later = self._follower = self._context._retract = None
        if turn is not None:
            turn.execution.cancel()
        if follower is not None and decode is not None:
            follower.cut(1 + decode.taken - (decode.taken > 0 and decode.last in self._ends))
            self._calm = None

    def undone(self) -> None:
        """The pass before it was undone, and it went with that: so does the grammar."""
        later, follower = self._later, self._follower
        self._turn = self._later = self._follower = None
        if follower is not None:
            follower.cut(0)
        elif later is not None and later.wait() and self._said.constraint is not None:
            self._said.constraint.rollback(1)
