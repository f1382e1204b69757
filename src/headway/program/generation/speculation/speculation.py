"""Speculative decoding of one generation: its drafter, in step with the sequence, and when to draft how much.

While drafting pays, every step is a round (`rounds.py`). Where it does not, the generation decodes ahead of its
program as ever. A drafter that is a plain function is then asked all the same, and its guess compared with the token
that comes, which costs next to nothing; one that computes (async) gets a short round now and then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any

from headway.base.errors import HeadwayError, Unsupported
from headway.base.specs.probes import Ranking
from headway.program.checks.ids import common
from headway.program.generation.draws import Drawing
from headway.program.generation.results import SpeculationStats
from headway.program.generation.speculation.drafter import (
    MAX_DRAFT,
    Draft,
    TokenView,
    checked_draft,
    copied_drafter,
    failed,
)
from headway.program.generation.speculation.pace import Pace
from headway.program.generation.speculation.rounds import Round

if TYPE_CHECKING:
    from headway.program.context import Context

TRIAL = 2  # drafts of a round that only tries whether drafting pays
PAUSE, LONGEST_PAUSE = 32, 1024  # tokens between two such rounds, which double as long as it does not
SHARE = 0.01  # of the time of a step that guesses may take which nobody verifies
KEEN = 3  # tokens after a draft was right for which the generation waits for the next draft, instead of running ahead
NONE = Draft(())  # of a drafter that computes, before it is asked


class Speculation:
    """Drafts for one generation."""

    def __init__(
        self, given: Any, context: Context, drawing: Drawing, verify: str = "match", pace: Pace | None = None
    ) -> None:
        self._given, self._context, self.drawing = given, context, drawing
        self._verify, self.rejects = verify, verify == "rejection"
        probes = drawing.probe if isinstance(drawing.probe, tuple) else (drawing.probe,)
        if self.rejects and any(isinstance(probe, Ranking) for probe in probes):
            raise Unsupported("Ranking reads what was drawn at a row, and verify='rejection' may keep another token")
        self._drafter = self._started()
        self._lines_only = not context.engine.capabilities.tree_drafts
        self._adaptive = bool(getattr(given, "adaptive", True))
        self._pace = Pace(context.engine._loop.step_costs) if pace is None else pace
        self._tokens: list[int] = []  # those that the drafter knows
        self._view = TokenView(self._tokens)
        self._stale = True  # the context may have other tokens
        self._guess: Draft | None = None  # what a drafter that is a plain function says comes next
        self._computes = iscoroutinefunction(self._drafter.draft)
        self._since_guess = self._guess_every = 1
        self._since_round, self._pause = 0, 0
        self._keen = KEEN  # tokens until it no longer waits for drafts
        self._error: HeadwayError | None = None  # of the drafter, for the next step to raise
        self.wanted = False
        self.stats = SpeculationStats()

    def fork(self, context: Context) -> Speculation:
        """The same for a fork of the sequence; what was measured comes along."""
        copied_drafter(self._given)  # raises if it cannot be
        return Speculation(self._given, context, self.drawing, self._verify, self._pace.copy())

    def _started(self) -> Any:
        """A drafter for this sequence."""
        drafter = copied_drafter(self._given) if hasattr(self._given, "copy") else self._given
        if hasattr(drafter, "bind"):  # those of ours that draw
            drafter.bind(self._context, self.drawing, rejects=self.rejects)
        return drafter

    def redraw(self, drawing: Drawing) -> None:
        """Tokens are drawn with another seed from now on."""
        self.drawing, self._stale = drawing, True
        if hasattr(self._drafter, "bind"):
            self._drafter.bind(self._context, drawing, rejects=self.rejects)

    def rest(self) -> None:
        """The generation has ended: keep no pages for what may never come."""
        if hasattr(self._drafter, "release"):
            self._drafter.release()

    # -- in step with the sequence ---------------------------------------------------------------------------------

    def look_again(self) -> None:
        """The context may have been changed by its program."""
        self._stale = True

    def add(self, tokens: Sequence[int], *, guessed: bool = True) -> None:
        """The generation has added tokens; with `guessed`, ones that came without a draft."""
        if self._stale:
            return
        self._tokens += tokens
        guess, self._guess = self._guess, None
        if guessed:
            self._since_round += len(tokens)
            self._keen -= len(tokens)
            if guess and tokens:
                self._pace.observe(guess.kind, guess.chance, int(guess.tokens[0] == tokens[0]), 1)
            else:
                self._pace.was_right = False
        self._tell(tokens)

    def decoded(self, token: int, limit: int) -> bool:
        """One more token came without a draft: whether the next step should be a round, of at most `limit` drafts."""
        self.add((token,))
        try:
            self.wanted = self._error is not None or self._wants(limit)
        except HeadwayError as error:  # the token stands: the next step raises it
            self._error, self.wanted = error, True
        return self.wanted

    def _tell(self, tokens: Sequence[int]) -> None:
        """Hand tokens to the drafter; what it raises, the next draft raises: the tokens stand."""
        try:
            self._drafter.accept(tuple(tokens))
        except Exception as error:
            self._error = failed(self._drafter, error)

    def is_at(self, tokens: int) -> bool:
        """Whether the drafter knows a sequence of so many tokens, is a plain function, and has no error to tell."""
        return not self._stale and len(self._tokens) == tokens and self._error is None and not self._computes

    def sync(self) -> None:
        """Read the context's tokens, if they may be others than the drafter knows."""
        table, known = self._context._table, len(self._tokens)
        if not self._stale and known == table.length + len(self._context._pending):
            return
        tokens = self._context.tokens
        if self._stale and (same := common(tokens, self._tokens)) < known:
            known = same
            if hasattr(self._given, "copy"):
                self.rest()
                self._drafter, known = self._started(), 0
        self._tokens[:] = tokens
        self._stale, self._guess = False, None
        self._tell(tokens[known:])

    # -- drafting --------------------------------------------------------------------------------------------------

    @property
    def _others(self) -> int:
        return self._context.engine._loop.queued

    def _length(self, draft: Draft, limit: int, others: int, *, right: bool | None = None) -> int:
        limit = min(limit, MAX_DRAFT)
        return self._pace.length(draft.kind, draft.chance, limit, others, right=right) if self._adaptive else limit

    def _wants(self, limit: int) -> bool:
        if self._stale or limit < 1 or not self._adaptive:
            return False
        others = max(0, self._others - 1)  # this sequence is decoding
        if self._computes:
            return self._since_round >= self._pause or self._length(NONE, limit, others) > 0
        self._since_guess += 1
        if self._since_guess < self._guess_every:
            return False
        self._since_guess, began = 0, time.perf_counter()
        guess = self._ask(min(limit, MAX_DRAFT))
        if isawaitable(guess):
            guess.close()  # type: ignore[attr-defined]
            self._computes = True
            return False
        self._guess = self._checked(guess, min(limit, MAX_DRAFT))
        step = self._context.engine._loop.step_costs.seconds(1)
        self._guess_every = 1 + int((time.perf_counter() - began) / (SHARE * step))
        # A round begins after the token in flight, so this guess must be right, and then those after it.
        return len(self._guess) > 0 and self._length(self._guess, len(self._guess), others, right=True) > 0

    @property
    def waits(self) -> bool:
        """Whether the generation should not run ahead: a draft was right just now, or one is wanted."""
        return self._keen > 0 or self.wanted or not self._adaptive

    def _checked(self, drafted: Any, limit: int) -> Draft:
        vocab = self._context.engine.vocab_size
        return checked_draft(self._drafter, drafted, limit, vocab, lines_only=self._lines_only)

    def _ask(self, limit: int) -> Any:
        try:
            return self._drafter.draft(self._view, limit)
        except Exception as error:
            raise failed(self._drafter, error) from error

    async def draft(self, limit: int) -> tuple[Draft, float]:
        """What to verify next, at most `limit` tokens, none where it does not pay; and the seconds that it took."""
        self.sync()
        if (error := self._error) is not None:
            self._error, self._stale = None, True
            raise error
        began, limit = time.perf_counter(), min(limit, MAX_DRAFT)
        if limit < 1:
            return Draft(()), 0.0
        if self._computes:
            limit = self._length(NONE, limit, self._others) or (
                min(TRIAL, limit) if self._since_round >= self._pause else 0
            )
            if limit == 0:
                return Draft(()), 0.0
        drafted = self._ask(limit)
        if isawaitable(drafted):
            self._computes = True
            try:
                drafted = await drafted
            except Exception as error:
                raise failed(self._drafter, error) from error
        draft = self._checked(drafted, limit)
        if not self._computes:
            draft = self._as_pays(draft)
        return draft, time.perf_counter() - began

    def draft_now(self, limit: int) -> tuple[Draft, float]:
        """The same without waiting, where the drafter `is_at` the sequence's end; the next step raises what fails."""
        began, limit = time.perf_counter(), min(limit, MAX_DRAFT)
        if limit < 1:
            return NONE, 0.0
        try:
            drafted = self._ask(limit)
            if isawaitable(drafted):
                drafted.close()  # type: ignore[attr-defined]
                self._computes = True
                return NONE, 0.0
            draft = self._as_pays(self._checked(drafted, limit))
        except HeadwayError as error:
            self._error = error
            return NONE, 0.0
        return draft, time.perf_counter() - began

    def _as_pays(self, draft: Draft) -> Draft:
        """As many of these drafts as pay."""
        return draft.cut(self._length(draft, len(draft), self._others)) if len(draft) else draft

    def verified(self, round: Round, draft: Draft, *, overhead: float, drafting: float) -> None:
        """A round has ended: measure it."""
        kept, drafted = round.accepted, len(round)
        old = self.stats
        self.stats = SpeculationStats(old.rounds + 1, old.drafted + drafted, old.accepted + kept)
        # A draft after the last that was kept was looked at too, if there was one.
        self._pace.observe(draft.kind, draft.chance, kept, min(kept + 1, drafted))
        cold = self._computes and old.rounds == 0  # a model has computed the prompt too
        self._pace.took(overhead=overhead, drafting=drafting, drafted=0 if cold else len(draft))
        if kept:
            self._keen = KEEN
        self._since_round, self.wanted = 0, False
        pays = self._length(draft, MAX_DRAFT, self._others) > 0
        self._pause = PAUSE if pays else min(LONGEST_PAUSE, max(PAUSE, 2 * self._pause))
