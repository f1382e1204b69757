"""The generator: many passes in a loop.

A `Generation` follows its context. Between two steps the program may look at the context, cut it, write into it, fork
the generation, add tokens by hand or take a step by hand; the next step starts from what is there:

    ctx.truncate   tokens that were cut are no longer generated: constraint, stops, text and max_tokens go back
    ctx.fill       what the program writes belongs to the prompt: constraint, stops, text and max_tokens ignore it
    gen.accept     what the program hands to the generation counts as sampled

What is in flight ahead of the program belongs to `lookahead.py`; this file never sees a job's insides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Self

from headway.base.errors import (
    Closed,
    ContextBusy,
    DeadlineExceeded,
    HeadwayError,
    InvalidInput,
    OutOfPages,
    PassFailed,
    TokenBudgetExceeded,
    Unsupported,
)
from headway.base.specs.logits_rules import LogitsRuleValues
from headway.base.specs.masks import Mask
from headway.base.specs.probes import Logits, Value_co
from headway.base.specs.samplers import Sampler
from headway.program.adapters import AdapterArgument, mix_of
from headway.program.checks.ids import integers, token_ids
from headway.program.constraints.async_mask import check_may_look
from headway.program.constraints.constraint import Constraint
from headway.program.constraints.grammar import Grammar
from headway.program.generation.constrained import GenerationConstraint
from headway.program.generation.draws import Drawing, Probes
from headway.program.generation.hooks import GenerationHooks, LogitsHook, PrepareHook
from headway.program.generation.last_seen import LastSeen
from headway.program.generation.logits_rules import LogitsRules
from headway.program.generation.lookahead import Lookahead, Waiter
from headway.program.generation.speculation.drafter import Drafter, check_drafter
from headway.program.generation.speculation.rounds_ahead import RoundInFlight, RoundsAhead
from headway.program.generation.speculation.speculation import Speculation, SpeculationStats
from headway.program.generation.steps import Prepared, Step, StepInFlight, not_an_end, probed
from headway.program.generation.stops import parse_json, read_stops
from headway.program.generation.transcript import Transcript
from headway.program.generation.word_bias import WordBias
from headway.program.output import Output
from headway.runtime.job import Job

if TYPE_CHECKING:
    from headway.program.context import Context


class Generation(Generic[Value_co]):
    """An async iterator of steps. Stops leave the context: tokens that hold any part of one are taken back.

    It stays ahead of the program: by one pass or, where a pass takes nothing but the token before it, by run-ahead
    decoding. Whoever looks at the context between two steps finds it idle all the same: what is in flight is taken back
    then, and the last token waits in the pending buffer. So an `async for` can be left with `break` and resumed later,
    by another `async for` or a collector.
    """

    def __init__(
        self,
        context: Context,
        sampler: Sampler,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop: str | Iterable[str | int] = (),
        stop_only: bool = False,
        constrain: Grammar | Constraint | None = None,
        no_repeat_ngram_size: int = 0,
        probe: Probes = None,
        attention_mask: Mask | None = None,
        adapter: AdapterArgument | None = None,
        speculate: Drafter | None = None,
        verify: Literal["match", "rejection"] = "match",
        penalize_prompt: bool = True,
        words: WordBias | None = None,
        prepare: PrepareHook | None = None,
        logits: LogitsHook | None = None,
        rules: LogitsRuleValues | None = None,
    ) -> None:
        if speculate is not None:
            check_drafter(speculate, verify)
        self._most = _count(max_tokens)
        (least,) = integers([min_tokens], "min_tokens")
        if not 0 <= least <= self._most:
            raise InvalidInput(
                f"min_tokens is {min_tokens}; it takes a whole number from 0 to max_tokens ({max_tokens})"
            )
        strings, self._end_ids = read_stops(stop, context.engine, stop_only)
        self._drawing = Drawing.of(
            context,
            sampler,
            end_ids=self._end_ids,
            least=least,
            probe=probe,
            attention_mask=attention_mask,
            penalize_prompt=penalize_prompt,
            adapter=mix_of(context.engine, adapter),
            words=words,
        )
        own = None if rules is None else LogitsRules(rules, self._drawing.sampler, context.engine)
        self._hooks = GenerationHooks.of(prepare, logits, own)
        if self._hooks is not None and speculate is not None:
            raise Unsupported(
                "speculate cannot be given with prepare or logits: a hook may look at the context, which has drafts in "
                "the place of tokens while they are verified; leave one out"
            )
        self._context = context
        self._rule = GenerationConstraint(context, constrain, no_repeat_ngram_size)
        self._transcript = Transcript(context.engine, strings, self._rule)
        self._seen = LastSeen(context)
        self._ahead = Lookahead(context, self._transcript, self._end_ids)
        self._speculation = None if speculate is None else Speculation(speculate, context, self._drawing, verify)
        self._rounds = None if self._speculation is None else RoundsAhead(context, self._transcript, self._speculation)
        self.finish: str | None = None
        self._is_stepping = False
        context._generations.add(self)

    def __repr__(self) -> str:
        state = f"ended ({self.finish})" if self.finish else "running" if self._seen.has_begun else "not begun"
        return f"<Generation: {len(self._transcript.generated)} of {self._most} tokens, {state}>"

    @property
    def context(self) -> Context:
        """The context it writes to."""
        return self._context

    @property
    def seed(self) -> int:
        """The seed of its samples, which depend on it and the position."""
        return self._drawing.seed

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, which is not in its text; None when it ended otherwise or has not ended."""
        return self._transcript.stop_string

    @property
    def speculation(self) -> SpeculationStats | None:
        """Its rounds, drafts and accepted drafts so far; None where it does not speculate."""
        return None if self._speculation is None else self._speculation.stats

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens so far: sampled, forced or accepted, and not cut since."""
        self._follow()
        return tuple(self._transcript.generated)

    # -- running ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Step[Value_co]]:
        return self

    async def __anext__(self) -> Step[Value_co]:
        if self._is_stepping:
            raise ContextBusy("this generation has a step in flight; await it before taking another")
        if self.finish is not None:
            raise StopAsyncIteration
        self._is_stepping = True
        try:
            return await self._next_step()
        except StopAsyncIteration as error:
            raise not_an_end() from error
        finally:
            self._is_stepping = False

    async def _next_step(self) -> Step[Value_co]:
        if self._ahead.is_there:
            job, token = self._ahead.take()
            if job is not None:
                if not isinstance(token, int):
                    token = await self._next_token(job, token)
                if token is not None:
                    return self._buffered_step(token)
                self._come_back()  # nothing may follow the last token
        if self._rounds is not None and (speculated := await self._claimed_step(self._rounds)) is not None:
            return speculated
        await self._rule.compile_async()
        step = self._ahead.claim()
        if step is None:
            self._follow()
            await self._rule.settle()
            self._follow()
            if (over := self._over()) is not None:
                return self._end(over)
            if forced := self.forced():
                return self._append(forced)
            if self._hooks is not None:
                return await self._hooked_step(self._hooks)
            if (speculated := await self._speculated_step()) is not None:
                return speculated
            step = self._drawing.prepared(self._context, self._transcript).execute()
            if self._speculation is not None:
                self._speculation.sync()  # a prompt is read while the device computes it
        if self._left > 1 and self._can_run_ahead():
            self._run_ahead(step)
        out = await self._outcome(step)
        token, probes = out.token(step.token), probed(out, step.probe)
        if not self._ahead.is_there and self._rule.is_grammar and token not in self._end_ids:
            return await self._grammar_step(token, probes)
        return self._sampled_step(token, probes)

    async def tokens(self) -> list[int]:
        """Run to the end; all tokens that stayed."""
        async for _ in self:
            pass
        return list(self.generated)

    async def text(self) -> str:
        """Run to the end; the whole text."""
        self._check_text()
        async for _ in self:
            pass
        self._follow()
        return self._transcript.whole()

    async def json(self, schema: Any = None) -> Any:
        """Run to the end; the text as JSON. With a schema (dict, text, pydantic model, Grammar) only such can come.

        A pydantic model class means its own fields only, and gives an object of it.
        """
        self._check_text()
        if schema is not None:
            begun = self._transcript.generated or self._ahead.is_there or self.finish is not None
            if begun or self._rule.is_given:
                raise InvalidInput("give json() a schema before the first step, and only without another constraint")
            self._rule.follow(schema if isinstance(schema, Grammar) else Grammar.json_schema(schema))
        return parse_json(await self.text(), self.finish, schema)

    def _check_text(self) -> None:
        """Raise before anything is computed where tokens have no text."""
        if not self._context.engine.has_tokenizer:
            raise Unsupported("this model has no tokenizer, so its tokens have no text; collect them with tokens()")

    # -- by hand ---------------------------------------------------------------------------------------------------

    def accept(self, tokens: Iterable[int]) -> Step[Value_co]:
        """Add tokens by hand, as if they had been sampled: they go through the constraint, the text and the stops.

        A token that the constraint forbids, more tokens than max_tokens leaves and tokens after a stop raise, and
        nothing has changed then. Nothing is computed: the tokens wait in the pending buffer.
        """
        self._go_on()
        self._rule.reread()
        ids = token_ids(tokens, self._context.engine.vocab_size)
        self._rule.compile()
        ends = [i for i, token in enumerate(ids) if token in self._end_ids]
        if not ends:
            return self._append(ids, whole=True)
        end, first = ids[ends[0]], ids[: ends[0]]
        if len(first) < len(ids) - 1:
            raise InvalidInput(f"token {end} ends the generation and {len(ids) - 1 - len(first)} tokens follow it")
        if len(self._transcript.generated) + len(first) < self._drawing.least:
            raise InvalidInput(f"token {end} would end the generation before min_tokens ({self._drawing.least})")
        step = self._append(first, whole=True, end=end)
        return self._end(self._reason(end), step)

    async def prepare(self) -> Prepared[Value_co]:
        """The next step, to be taken by hand: a pass with the generation's masks, sampler and probe.

        Tokens that the constraint forces need no pass: `gen.accept(gen.forced())`.
        """
        self._go_on()
        await self._rule.compile_async()
        await self._rule.settle()
        if (over := self._over()) is not None:
            raise Closed(f"no step is left to prepare: the next one only ends the generation ({over})")
        prepared = self._drawing.prepared(self._context, self._transcript)
        return replace(prepared, _mark=self._seen.mark, _taken=self._take)

    def forced(self) -> list[int]:
        """Tokens that the constraint forces: fed together, without a pass for each."""
        self._rest()
        self._rule.compile()
        tokens = self._rule.forced()[: self._left]
        ends = [i for i, token in enumerate(tokens) if token in self._end_ids]
        return tokens[: ends[0]] if ends else tokens

    def fork(self, *, seed: int | None = None) -> Generation[Value_co]:
        """A second generation that goes on from here, on a fork of the context: `.context`, which is the caller's.

        Explicit seeds come along, so the same tokens follow, unless `seed` gives another one; without, the fork samples
        with fresh entropy. A constraint is copied; one without `copy()` raises.
        """
        self._check_idle()
        self._follow()
        context = self._context.fork()  # first: nobody is at work on the constraint of an idle context
        try:
            transcript = self._transcript.fork(context)
            speculation = None if self._speculation is None else self._speculation.fork(context)
        except BaseException:
            context.release()
            raise
        twin = copy(self)
        twin._context, twin._transcript, twin._speculation = context, transcript, speculation
        twin._is_stepping = False
        if self._rounds is not None and speculation is not None:
            twin._rounds = self._rounds.fork(context, transcript, speculation)
        twin._rule, twin._seen = transcript.rule, self._seen.fork(context)
        twin._ahead = self._ahead.fork(context, transcript)
        context._generations.add(twin)
        return twin.reseed(seed) if seed is not None or not self._drawing.seeded else twin

    def reseed(self, seed: int | None = None) -> Self:
        """Sample the tokens that follow with another seed, or with fresh entropy.

        A sample is a function of the seed and the position: a token that was cut comes again unless something changes.
        """
        self._rest()
        self._drawing = self._drawing.reseeded(seed)
        if self._speculation is not None:
            self._speculation.redraw(self._drawing)
        return self

    def resume(self, max_tokens: int | None = None) -> Self:
        """Go on after an end, with the context as it is now and `max_tokens` more tokens, or those that were left."""
        more = None if max_tokens is None else _count(max_tokens)
        if self._rounds is not None and self._rounds.is_there:
            self._rest()  # it was drafted for as many tokens as were left
        self._follow()
        if more is not None:
            self._most = len(self._transcript.generated) + more
        if self.finish is not None:
            self._transcript.reopen()
            self.finish = None
        return self

    # -- in step with the context ----------------------------------------------------------------------------------

    @property
    def _left(self) -> int:
        return self._most - len(self._transcript.generated)

    def _go_on(self) -> None:
        """Get ready for something by hand: not over, nothing in flight, in step with the context."""
        if self.finish is not None:
            raise Closed(f"this generation ended ({self.finish}); call resume() to go on")
        self._rest()
        self._follow()

    def _rest(self) -> None:
        """Take back what is in flight."""
        with self._context.engine._lock:
            self._check_idle()
            self._come_back()

    def _check_idle(self) -> None:
        """Raise while a step is in flight."""
        self._ahead.check_idle()
        if self._rounds is not None:
            self._rounds.check_idle()

    @property
    def _is_ahead(self) -> bool:
        """Whether something is in flight that the program has not asked for."""
        return self._ahead.is_there or (self._rounds is not None and self._rounds.is_there)

    def _come_back(self) -> None:
        """What the context calls when somebody looks at it between two steps."""
        if self._ahead.is_there:
            self._retract(self._ahead.fed)
        elif self._rounds is not None and self._rounds.is_there:
            with self._context.engine._lock:
                self._rounds.take_back()
                self._seen.update()

    def _retract(self, token: int | None) -> None:
        """Take back what is in flight; its token waits in the pending buffer instead."""
        with self._context.engine._lock:
            self._ahead.take_back()
            if token is not None:
                self._context.fill([token])
            self._seen.update()

    def _follow(self) -> None:
        """Notice what the program has done to the context since the last step."""
        check_may_look()
        if self._is_ahead:  # nothing: its pass would have been taken back
            return
        seen, begun, cut = self._seen, self._seen.has_begun, self._seen.cut
        if seen.is_current and cut is None:
            return
        seen.update()
        if self._speculation is not None:
            self._speculation.look_again()
        if begun:
            self._transcript.follow(self._context.tokens, cut)
        else:
            self._transcript.begin(self._context.tokens, self._context.text_start)

    def _slots_moved(self) -> None:
        """The program has moved slots of the context: what was generated stays, wherever it is now."""
        self._transcript.settle(self._context.tokens)
        self._seen.update()

    # -- one step --------------------------------------------------------------------------------------------------

    def _over(self) -> str | None:
        """Why no pass can follow, if none can."""
        if self._rule.finished:
            return "constraint"
        # A last token at the limit of positions cannot be computed.
        return "length" if self._left <= 0 or (self._transcript.generated and self._context._room() < 0) else None

    def _can_run_ahead(self) -> bool:
        """Whether the next pass can be built before this one's token is known."""
        if self._speculation is not None and self._speculation.waits:
            return False
        return not self._drawing.looks_back and self._context._room() > 1 and self._ahead.can_follow(self._drawing)

    def _run_ahead(self, step: StepInFlight) -> None:
        """Queue the next pass with the token that this one samples, so that the device never waits for the program.

        Where it takes nothing but the token, it continues by itself from then on.
        """
        # What prevents it is raised by its own step, or by this step's outcome if that has failed already.
        with suppress(OutOfPages, TokenBudgetExceeded, DeadlineExceeded, PassFailed):
            self._ahead.start(self._drawing, step.token, min(self._left, self._context._room()) - 1)

    async def _next_token(self, job: Job, waiter: Waiter | None) -> int | None:
        """The next token of run-ahead decoding; on an error the context is as it was after the last token."""
        try:
            return await self._ahead.wait(job, waiter)
        except BaseException as error:
            with suppress(Closed, ContextBusy, PassFailed), self._context.engine._lock:
                if self._ahead.is_untouched():
                    self._come_back()
                else:  # it failed, and somebody changed the context before this was known
                    self._retract(None)
                    self._seen.invalidate()
            if isinstance(error, CancelledError):
                raise asyncio.CancelledError from None
            raise

    def _buffered_step(self, token: int) -> Step[Value_co]:
        """The step of a token that was taken from the buffer. Most tokens come this way, so it is short."""
        transcript, ahead = self._transcript, self._ahead
        probes = () if self._drawing.probe is None else self._drawing.of_values(ahead.values)
        if token in self._end_ids:
            self._retract(None)
            return self._end(self._reason(token), Step((), "", probes))
        try:
            transcript.add(token, accepted=ahead.has_constraint and ahead.has_accepted())
        except BaseException:  # a program's own constraint has refused it
            self._retract(None)
            raise
        if self._speculation is not None and self._speculation.decoded(token, self._most_drafts):
            ahead.finish()
        if transcript.stopped or len(transcript.generated) >= self._most or ahead.is_spent:
            self._retract(token)
            return self._step([token], probes)
        self._context._retract = self._come_back
        return Step.of_token(token, *transcript.take_text(), probes)

    async def _outcome(self, step: StepInFlight) -> Output:
        try:
            return await step.execution
        except BaseException:
            self._ahead.undone()
            self._put_back()
            raise

    def _put_back(self) -> None:
        """The pass that was fed with the last token was undone: the token goes back to the pending buffer.

        A context that is gone, or that somebody has changed meanwhile, is left alone.
        """
        with suppress(Closed, ContextBusy, PassFailed), self._context._changing():
            if self._transcript.lacks_last(self._context.tokens):
                self._context.fill([self._transcript.generated[-1]])
                self._seen.update()

    async def _take(self, prepared: Prepared[Any]) -> Step[Value_co]:
        self._go_on()
        if prepared._mark != self._seen.mark:
            raise Closed("the context was changed since this step was prepared; prepare another one")
        out = await prepared.forward.execute()
        return self._sampled_step(out.token(prepared.token), probed(out, prepared.probe))

    # -- a step over drafts ----------------------------------------------------------------------------------------

    @property
    def _most_drafts(self) -> int:
        """How many drafts the next pass may have."""
        return 0 if self._rounds is None else self._rounds.most_drafts(self._left)

    async def _speculated_step(self) -> Step | None:
        """A step that verifies drafts, or None where none pay."""
        speculation, rounds, began = self._speculation, self._rounds, time.perf_counter()
        if speculation is None or rounds is None or self._most_drafts == 0 or self._rule.is_slow:
            return None  # a slow grammar would be asked for a mask at every draft
        draft, drafting = await speculation.draft(self._most_drafts)
        if not self._seen.is_current:  # somebody changed the context meanwhile
            return await self._next_step()
        if not len(draft):
            return None
        try:
            turn = rounds.begin(self._drawing, draft, drafting=drafting, began=began, left=self._left)
        except HeadwayError:  # a draft may be what fails; where it is not, the pass without drafts says so
            return None
        return None if turn is None else await self._round_step(rounds, turn)

    async def _claimed_step(self, rounds: RoundsAhead) -> Step | None:
        """The step of the round that is ahead, if there is one."""
        turn = rounds.claim(self._left)
        return None if turn is None else await self._round_step(rounds, turn)

    async def _round_step(self, rounds: RoundsAhead, turn: RoundInFlight) -> Step | None:
        """The step of a round in flight; None if it fails."""
        try:
            out = await rounds.outcome(turn)
        except HeadwayError:  # as above
            self._seen.update()
            return None
        round = turn.round
        step = self._verified_step(turn, round.probes(out))
        if not turn.is_measured:
            assert self._speculation is not None
            self._speculation.verified(round, turn.draft, overhead=turn.overhead_now, drafting=turn.drafting)
        if rounds.is_there:
            self._context._retract = self._come_back
        return replace(step, drafted=len(round), accepted=round.accepted)

    def _verified_step(self, turn: RoundInFlight, probes: list[tuple[Any, ...]]) -> Step:
        """The step of the tokens that a round adds, up to what ends the text."""
        added: list[int] = []
        with self._context.engine._lock:
            try:
                end = turn.round.add_to(self._context, added, is_in_place=turn.is_in_place)
            finally:
                self._seen.update()
                assert self._speculation is not None
                if not turn.is_measured:
                    self._speculation.add(added, guessed=False)
        values = tuple(value for each in probes[: len(added) + (end is not None)] for value in each)
        if end is not None:
            return self._end(self._reason(end), Step(tuple(added), "", values))
        if self._left > 0 and self._transcript.constraint is not None:
            self._ahead.observe()
        return self._step(added, values)

    # -- a step with hooks -----------------------------------------------------------------------------------------

    async def _hooked_step(self, hooks: GenerationHooks) -> Step[Value_co]:
        """A step in which the program has a say: before its pass, or before its draw."""
        prepared = self._drawing.prepared(self._context, self._transcript)
        await hooks.before(prepared)
        self._check_untouched("prepare")
        forward, handle = prepared.forward, None
        if hooks.reads_logits:
            handle = forward.probe(-1, Logits())
        step = prepared.execute()
        readout = step.execution._job.work.readouts[prepared.token.first]
        out = await self._outcome(step)
        self._seen.update()
        token = out.token(prepared.token)
        if handle is not None:
            position = self._context.next_position - 1
            token = await hooks.token(out.logits(handle), token, readout, position, self)
            self._check_untouched("logits")
        return self._sampled_step(token, probed(out, prepared.probe))

    def _check_untouched(self, hook: str) -> None:
        if not self._seen.is_current:
            raise InvalidInput(
                f"the {hook} hook has changed the context of its generation; a hook may read it and fork it"
            )

    # -- what became of it -----------------------------------------------------------------------------------------

    def _sampled_step(self, token: int, probes: tuple[Any, ...]) -> Step[Value_co]:
        """The step of a token that a pass has sampled."""
        if token in self._end_ids:
            self._retract(None)
            return self._end(self._reason(token), Step((), "", probes))
        kept = None
        try:
            self._transcript.add(token, accepted=self._ahead.accepts())
            kept = token
            if self._speculation is not None:
                self._speculation.decoded(token, self._most_drafts)
            if self._left > 0:
                self._ahead.observe()
            alone = not self._ahead.is_there or self._transcript.stopped or self._is_finished
        except BaseException:  # the grammar failed, and will fail again for whoever asks again
            self._retract(kept)
            raise
        if alone:
            self._retract(token)
        else:
            self._context._retract = self._come_back
        return self._step([token], probes)

    async def _grammar_step(self, token: int, probes: tuple[Any, ...]) -> Step[Value_co]:
        """The same under a grammar, which may be slow. When it is cancelled the token is there, and the next step has
        its text."""
        try:
            with self._rule.hurrying():
                self._transcript.add(token)
        except BaseException:
            self._retract(None)
            raise
        if self._speculation is not None:
            self._speculation.decoded(token, self._most_drafts)
        self._retract(token)
        if not self._transcript.stopped and (self._left > 0 or self._rule.is_slow):
            await self._rule.settle()
        if self._left > 0:
            self._ahead.observe()
        return self._step([token], probes)

    def _append(self, ids: list[int], *, whole: bool = False, end: int | None = None) -> Step[Value_co]:
        """Add tokens that were not sampled, up to a stop string; with `whole`, one before the last token is refused."""
        if len(ids) > self._left:
            raise InvalidInput(f"{len(ids)} tokens were given; max_tokens leaves room for {self._left}")
        with self._transcript.adding(ids, whole=whole, before_end=end is not None) as taken:
            if end is not None and not self._rule.may_end:
                raise InvalidInput(f"token {end} would end the generation and the constraint does not allow that here")
            self._context.fill(taken)
        if self._speculation is not None:
            self._speculation.add(taken, guessed=False)
        self._seen.update()
        return self._step(taken)

    def _step(self, tokens: list[int], probes: tuple[Any, ...] = ()) -> Step[Value_co]:
        """The step of these tokens, which is the last one if they end the generation."""
        if self._transcript.stopped:
            surplus = self._transcript.stop()
            self._context.truncate(surplus)
            if self._speculation is not None:
                self._speculation.look_again()
            self._seen.update()
            return self._end("stop", Step(tuple(tokens[: max(0, len(tokens) - surplus)]), "", probes))
        text, retracted = self._transcript.take_text()
        step = Step(tuple(tokens), text, probes, retracted=retracted)
        if self._is_finished:
            return self._end("constraint", step)
        return self._end("length", step) if self._left <= 0 else step

    @property
    def _is_finished(self) -> bool:
        """Whether the constraint allows nothing after the last token."""
        return not self._ahead.has_constraint and self._rule.is_over(last=self._left <= 0)

    def _end(self, why: str, step: Step[Any] | None = None) -> Step[Value_co]:
        """The last step, with the text that was held back."""
        self.finish = why
        if self._speculation is not None:
            self._speculation.rest()
        self._transcript.close()
        text, retracted = self._transcript.take_text()
        step = step or Step((), "")
        return replace(step, text=step.text + text, finish=why, retracted=step.retracted + retracted)

    def _reason(self, token: int) -> str:
        return "eos" if token in self._context.engine.eos_ids else "stop"


def _count(max_tokens: int) -> int:
    (count,) = integers([max_tokens], "max_tokens")
    if count < 1:
        raise InvalidInput(f"max_tokens is {max_tokens}; it takes a whole number from 1")
    return count
