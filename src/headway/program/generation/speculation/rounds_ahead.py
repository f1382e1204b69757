"""The rounds of a generation that are in flight: the one its program awaits, and the one after it.

    device    round 1 ────────▶ round 2 ────────▶ round 3
    worker               ends,            ends,
                         drafts, submits  drafts, submits
    program   awaits 1 ───▶ tokens of 1 · awaits 2 ──▶ tokens of 2 · awaits 3

Where nothing but the drawn tokens decides what follows, the next round is drafted and submitted by the engine's worker
as soon as the one before has ended. Otherwise the device would wait for two changes of threads and the program. A round
is followed only while its program awaits it, so at most one is ahead; between two steps it can be taken back. A program
that has looked at its context there will do so again: the more often, the fewer rounds are followed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass
from headway.base.errors import ContextBusy
from headway.program.execution import Execution
from headway.program.generation.draws import Drawing
from headway.program.generation.speculation.drafter import Draft
from headway.program.generation.speculation.rounds import Round
from headway.program.generation.speculation.speculation import Speculation
from headway.program.generation.transcript import Transcript
from headway.program.output import Output

if TYPE_CHECKING:
    from headway.program.context import Context

LONGEST_PAUSE = 63  # rounds that are not followed


@dataclass(eq=False)
class RoundInFlight:
    """A round that was submitted.

    `overhead` are the seconds of the host before it, besides those of `drafting`. When it ends, `is_measured` says that
    its drafter knows its tokens, and `is_in_place` that they are in the context, because the next round follows them.
    """

    round: Round
    draft: Draft
    execution: Execution[Output]
    drafting: float
    overhead: float
    left: int = 0  # tokens that its generation may add
    asked: float = 0.0  # when its program began to await it
    is_measured: bool = False
    is_in_place: bool = False

    @property
    def overhead_now(self) -> float:
        """The seconds of the host before it, and since its end."""
        return self.overhead + time.perf_counter() - max(self.asked, self.execution._job.ended)


class RoundsAhead:
    """At most two rounds: one that the program awaits, and one after it that it has not asked for yet."""

    def __init__(self, context: Context, transcript: Transcript, speculation: Speculation) -> None:
        self._context, self._transcript, self._speculation = context, transcript, speculation
        self._lock = context.engine._lock
        self._awaited: RoundInFlight | None = None
        self._next: RoundInFlight | None = None
        self._pause = self._waits = 0  # rounds that are not followed after one was taken back; of these, those left

    def fork(self, context: Context, transcript: Transcript, speculation: Speculation) -> RoundsAhead:
        """Nothing is in flight for a fork."""
        return RoundsAhead(context, transcript, speculation)

    @property
    def is_there(self) -> bool:
        """Whether a round is in flight that the program has not asked for."""
        return self._next is not None

    def check_idle(self) -> None:
        """Raise while the program awaits a round: the worker may be asking the drafter, and nobody else may."""
        if self._awaited is not None or (self._next is not None and self._context._retract is None):
            raise ContextBusy("this generation has a step in flight; await it before steering the generation")

    def most_drafts(self, left: int) -> int:
        """How many drafts the next round may have, where so many tokens may still come."""
        context = self._context
        if context._table.token_budget is not None or len(context._pending) >= context.page_size:
            return 0  # a rejected draft would count; the prefix cache may have what waits
        return max(0, min(left - 1, context._room()))

    # -- for the program -------------------------------------------------------------------------------------------

    def begin(
        self, drawing: Drawing, draft: Draft, *, drafting: float, began: float, left: int
    ) -> RoundInFlight | None:
        """Submit a round of these drafts for the program to await; None if the constraint allows none of them."""
        turn = self._submit(drawing, draft, drafting=drafting, began=began + drafting)
        if turn is not None:
            self._await(turn, left)
        return turn

    def claim(self, left: int) -> RoundInFlight | None:
        """The round that is ahead, if there is one; from now on nobody takes it back."""
        with self._lock:
            self.check_idle()
            turn, self._next = self._next, None
            if turn is not None:
                self._context._retract = None
                self._await(turn, left)
        return turn

    async def outcome(self, turn: RoundInFlight) -> Output:
        """What a round has computed; where that fails, the context is as it was before it."""
        try:
            return await turn.execution
        except BaseException:
            with self._lock:
                if turn.is_in_place:
                    self.take_back()
                    self._take_out(turn)
                    turn.execution.cancel()
                    self._speculation.look_again()
            raise
        finally:
            self._awaited = None

    def take_back(self) -> None:
        """Cancel the round that is ahead."""
        turn, self._next, self._context._retract = self._next, None, None
        if turn is not None:
            turn.execution.cancel()
            self._waits = self._pause = min(LONGEST_PAUSE, 2 * self._pause + 1)

    # -- one after the other ---------------------------------------------------------------------------------------

    def _await(self, turn: RoundInFlight, left: int) -> None:
        with self._lock:
            turn.left, turn.asked, self._awaited = left, time.perf_counter(), turn

    def _submit(self, drawing: Drawing, draft: Draft, *, drafting: float, began: float) -> RoundInFlight | None:
        speculation = self._speculation
        round = Round(self._context, drawing, self._transcript, draft, rejects=speculation.rejects)
        if not len(round):
            return None
        with self._lock:
            execution = round.execute()
            turn = RoundInFlight(round, draft, execution, drafting, time.perf_counter() - began)
            self._waits -= self._waits > 0
            if round.can_be_followed and not (self._waits or self._transcript.has_stops):
                execution._job.follow_up = lambda: self._follow(turn)
        return turn

    def _follow(self, turn: RoundInFlight) -> None:
        """The round has ended: submit the next one, where one pays. On the worker's thread, without the lock."""
        round, speculation, context = turn.round, self._speculation, self._context
        left, rest, ended = turn.left - len(round.tokens), round.tokens[round.computed :], turn.execution._job.ended
        with self._lock:
            if left < 2 or round.ends or not self._is_as_left(turn) or not speculation.is_at(round.before):
                return
            if not (round.accepted or speculation.stats.accepted):
                return  # what is never right may never pay: its program decodes ahead
            limit = max(0, min(self.most_drafts(left), context._room() - len(rest)))
        turn.is_measured = True
        speculation.add(round.tokens, guessed=False)
        speculation.verified(round, turn.draft, overhead=turn.overhead, drafting=turn.drafting)
        draft, drafting = speculation.draft_now(limit)
        if not len(draft):
            return
        with self._lock:
            if not self._is_as_left(turn):
                return
            context._pending += rest
            try:
                self._next = self._submit(speculation.drawing, draft, drafting=drafting, began=ended + drafting)
            except Exception:  # a draft may be what fails; the program's own step tells
                self._next = None
            turn.is_in_place = self._next is not None
            if not turn.is_in_place:
                del context._pending[len(context._pending) - len(rest) :]

    def _is_as_left(self, turn: RoundInFlight) -> bool:
        """Whether the program still awaits it and nobody has changed the context since it ended."""
        job, context = turn.execution._job, self._context
        same = job.left is context._table.stamp and not context._pending
        return self._awaited is turn and same and not job.abandoned and not context._table.closed

    def _take_out(self, turn: RoundInFlight) -> None:
        """Its tokens are no longer to be computed."""
        pending, count = self._context._pending, len(turn.round.tokens) - turn.round.computed
        del pending[len(pending) - count :]
