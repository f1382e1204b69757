"""What a generation has in flight ahead of its program: a pass fed with an unread token, or run-ahead decoding.

Between two steps it can be taken back at any time: the context does so when somebody looks at it. A grammar that binds
the tokens has moved on with them, and is rolled back then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from headway.base.errors import ContextBusy
from headway.base.specs.masks import Mask
from headway.program.constraints.async_mask import DENSE, GrammarCursor, GrammarMask, ProgramCursor, ProgramMask
from headway.program.constraints.budget import TokenTime
from headway.program.constraints.constraint import GrammarMatcher
from headway.program.generation.draws import Drawing
from headway.program.generation.steps import StepInFlight
from headway.program.generation.transcript import Transcript
from headway.program.output import SampleHandle
from headway.runtime.decode import Decode
from headway.runtime.job import Job

if TYPE_CHECKING:
    from headway.program.context import Context

Waiter: TypeAlias = "asyncio.Future[None]"

# A grammar runs ahead of the program while its masks are dense: from the start, or for this many tokens in a row. Where
# masks are sparse, forced tokens are near, and they come sooner in one pass with the token before them. A program's own
# constraint runs ahead likewise, until it forces tokens or has no mask in time.
DENSE_STEPS = 8


class Lookahead:
    """At most one pass, which may continue as a decoding sequence, and the masks of the grammar that binds it."""

    def __init__(
        self, context: Context, transcript: Transcript, end_ids: frozenset[int], dense_steps: int | None = None
    ) -> None:
        self._context, self._transcript, self._end_ids = context, transcript, end_ids
        self._loop, self._lock = context.engine._loop, context.engine._lock
        self._step: StepInFlight | None = None
        self._mask: GrammarMask | ProgramMask | None = None  # its mask, if a constraint binds it
        self._cursor: GrammarCursor | ProgramCursor | None = None  # those of a decoding sequence
        self._own_pace = TokenTime()  # of a program's own constraint
        self._dense_steps = dense_steps  # tokens in a row after which the mask was dense; None: look when it matters

    def fork(self, context: Context, transcript: Transcript) -> Lookahead:
        """Nothing is in flight for a fork; what is known of the grammar comes along."""
        twin = Lookahead(context, transcript, self._end_ids, self._dense_steps)
        twin._own_pace = self._own_pace.copy()
        return twin

    @property
    def is_there(self) -> bool:
        return self._step is not None

    @property
    def has_constraint(self) -> bool:
        """Whether run-ahead decoding has moved the constraint past the program's last token."""
        return self._cursor is not None

    @property
    def fed(self) -> int:
        """The last token that the program has: what the pass was fed with, or what was taken from the buffer."""
        decode = self._decode
        return self._transcript.generated[-1] if decode is None else decode.last

    @property
    def values(self) -> Sequence[object]:
        """What was probed for the token that was taken from the buffer last."""
        decode = self._decode
        return () if decode is None else decode.last_values

    @property
    def _decode(self) -> Decode | None:
        return None if self._step is None else self._step.execution._job.decode

    def check_idle(self) -> None:
        """Raise while a step is in flight: the pass ahead then follows one whose token nobody has yet."""
        with self._lock:
            if self._step is not None and self._context._retract is None:
                raise ContextBusy("this generation has a step in flight; await it before steering the generation")

    # -- starting --------------------------------------------------------------------------------------------------

    def can_follow(self, drawing: Drawing) -> bool:
        """Whether what binds the next token can be computed concurrently with the device."""
        rule = self._transcript.rule
        if rule.active is None:
            return True
        if rule.is_slow or self._own_pace.is_slow:
            return False  # no step waits for its masks
        if not rule.is_grammar and not (rule.runs_ahead and drawing.repeats(self._context, self._transcript)):
            return False  # it is asked in its program's thread
        if self._dense_steps is None:  # its mask was computed just now, for the pass that this one would follow
            self._dense_steps = DENSE_STEPS if self._is_dense() else 0
        return self._dense_steps >= DENSE_STEPS

    def start(self, drawing: Drawing, fed: SampleHandle, left: int) -> None:
        """Queue a pass that is fed with the token of the one before.

        Where it takes nothing but the token, it continues by itself from then on, for at most `left` tokens.
        """
        constraint, vocab = self._transcript.constraint, self._context.engine.vocab_size
        with self._lock:
            if isinstance(constraint, GrammarMatcher):
                self._mask = GrammarMask(constraint, self._end_ids, vocab)
            elif constraint is not None:
                self._mask = ProgramMask(constraint, self._end_ids, vocab, self._own_pace)
            else:
                self._mask = None
            self._step = drawing.prepared(self._context, self._transcript, fed, self._mask).execute()
            repeats = drawing.repeats(self._context, self._transcript)
            assert repeats or not isinstance(self._mask, ProgramMask), "only a decoding sequence knows void tokens"
            if repeats:
                self._decode_on(drawing.attention, left)

    def _decode_on(self, attention: Mask | None, left: int) -> None:
        assert self._step is not None
        engine, job, constraint = self._context.engine, self._step.execution._job, self._transcript.constraint
        if isinstance(self._mask, ProgramMask):
            self._cursor = ProgramCursor(self._mask)
        elif isinstance(constraint, GrammarMatcher):
            assert self._mask is not None
            self._cursor = GrammarCursor(self._mask, constraint, self._end_ids, engine.vocab_size)
        first, *probes = job.work.readouts
        readout = replace(first, async_mask=None)
        adapters = None if job.work.adapters is None else job.work.adapters[0]
        engine._loop.decode(job, Decode(readout, tuple(probes), attention, self._end_ids, left, self._cursor, adapters))

    # -- the step that it makes ------------------------------------------------------------------------------------

    def claim(self) -> StepInFlight | None:
        """The pass, if there is one; from now on nobody takes it back."""
        with self._lock:
            self.check_idle()
            step = self._step
            if step is not None:
                self._step = self._context._retract = None
            return step

    def take(self) -> tuple[Job | None, int | Waiter | None]:
        """The decoding sequence, if there is one, and its next token, or what to `wait` for until there is one.

        From now on nobody takes it back, until the step is made.
        """
        with self._lock:
            step = self._step
            job = None if step is None else step.execution._job
            if job is None or job.decode is None:
                return None, None
            if self._context._retract is None:
                self.check_idle()
            self._context._retract = None
            return job, self._look(job)

    def _look(self, job: Job) -> int | Waiter | None:
        """The next token, a future that is set when there may be one, or None if there will be none. Under the lock."""
        token = self._loop.next_token(job)
        if token is not None or job.decode is None or job.decode.over or job.outcome.done():
            job.waiters.clear()  # nobody is woken for tokens that nobody waits for
            return token
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        job.waiters[:] = [(loop, waiter)]
        return waiter

    async def wait(self, job: Job, waiter: Waiter | None) -> int | None:
        """The next token of a decoding sequence, once it is sampled; None if the sequence ended without one."""
        token: int | Waiter | None = waiter
        while isinstance(token, asyncio.Future):
            await token
            with self._lock:
                token = self._look(job)
        if token is None and not (job.decode is not None and job.decode.over):
            job.outcome.result()
            raise AssertionError("a decoding sequence has no result")
        return token

    def finish(self) -> None:
        """Let a decoding sequence end after the token in flight."""
        with self._lock:
            if self._step is not None:
                self._loop.finish(self._step.execution._job)

    def is_untouched(self) -> bool:
        """Whether the context is as the decoding sequence has left it."""
        decode, context = self._decode, self._context
        return decode is not None and context._table.stamp is decode.stamp and not context.pending

    @property
    def is_spent(self) -> bool:
        """Whether the buffer is empty and no token will come."""
        decode = self._decode
        return decode is not None and decode.over and not decode.buffer

    # -- the constraint -----------------------------------------------------------------------------------------------

    def has_accepted(self) -> bool:
        """Whether the constraint has accepted the token that was just taken from the buffer."""
        decode = self._decode
        return self._cursor is not None and decode is not None and self._cursor.has_accepted(decode.taken)

    def accepts(self) -> bool:
        """Whether the constraint has accepted the token, sampled just now, that the pass is fed with."""
        mask, self._mask = self._mask, None
        return mask is not None and mask.wait()

    def observe(self) -> None:
        """The program has one more token: note whether the mask after it is dense."""
        if self._transcript.rule.is_slow:
            self._dense_steps = 0
        elif self._cursor is None:  # else the grammar is ahead of the program
            self._dense_steps = (self._dense_steps or 0) + 1 if self._is_dense() else 0

    def _is_dense(self) -> bool:
        rule, constraint = self._transcript.rule, self._transcript.constraint
        if isinstance(constraint, GrammarMatcher):
            return constraint.mask_density >= DENSE
        return rule.runs_ahead and not rule.forced()

    # -- taking it back --------------------------------------------------------------------------------------------

    def take_back(self) -> None:
        """Cancel the pass, and drop its tokens that were not taken."""
        decode, step, cursor = self._decode, self._step, self._cursor
        self._step = self._mask = self._cursor = self._context._retract = None
        if step is not None:
            step.execution.cancel()
        if cursor is not None and decode is not None:
            cursor.cut(1 + decode.taken - (decode.taken > 0 and decode.last in self._end_ids))
            self._dense_steps = 0 if cursor.is_broken else None

    def undone(self) -> None:
        """The pass before it was undone, and this one with it: roll the grammar back."""
        mask, cursor = self._mask, self._cursor
        self._step = self._mask = self._cursor = None
        if cursor is not None:
            cursor.cut(0)
        elif mask is not None and mask.wait() and self._transcript.constraint is not None:
            self._transcript.constraint.rollback(1)
