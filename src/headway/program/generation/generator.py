"""The generator: many passes in a loop, written only with what a user also has.

A `Generation` follows its context. Between two steps the program may look at the context, cut it, write into it, fork
the generation, put tokens in by hand or take a step by hand; the next step starts from what is there:

    ctx.truncate   tokens that were cut are no longer generated: constraint, stops, text and max_tokens go back
    ctx.fill       what the program writes belongs to the prompt: constraint, stops, text and max_tokens ignore it
    gen.accept     what the program hands to the generation counts as drawn
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from headway.base.errors import (
    Closed,
    ContextBusy,
    DeadlineExceeded,
    InvalidInput,
    OutOfPages,
    PassFailed,
    TokenBudgetExceeded,
    Unsupported,
)
from headway.base.masks import Mask
from headway.base.probes import Probe
from headway.base.samplers import Sampler
from headway.base.text import short_repr
from headway.program.constraints.constraint import Constraint, GrammarMatcher, compile_async
from headway.program.constraints.constraint import compile as compile_grammar
from headway.program.constraints.grammar import Grammar
from headway.program.generation.draws import Drawing
from headway.program.generation.lookahead import Lookahead
from headway.program.generation.steps import Prepared, Step, Turn, probed
from headway.program.generation.stops import parse_json, read_stops
from headway.program.generation.transcript import Transcript
from headway.program.ids import integers, token_ids
from headway.program.output import Output
from headway.runtime.job import Job

if TYPE_CHECKING:
    from headway.program.context import Context


class Generation:
    """An async iterator of steps. Stops leave the context: tokens that hold any part of one are taken back.

    It stays ahead of the program: by one pass or, where a pass takes nothing but the token before it, by as many as a
    streak may be. Whoever looks at the context between two steps finds it idle all the same: what is ahead is taken
    back then, and the last token waits in the pending buffer. So an `async for` can be left with `break` and taken up
    again later, by another `async for` or a collector.
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
        probe: Probe | None = None,
        attention_mask: Mask | None = None,
        adapter: object = None,
        speculate: object = None,
        penalize_prompt: bool = True,
    ) -> None:
        _refuse(adapter=adapter, speculate=speculate)
        self._most = _count(max_tokens)
        (least,) = integers([min_tokens], "min_tokens")
        if not 0 <= least <= self._most:
            raise InvalidInput(
                f"min_tokens is {min_tokens}; it takes a whole number from 0 to max_tokens ({max_tokens})"
            )
        strings, self._ids = read_stops(stop, context.engine, stop_only)
        self._how = Drawing.of(
            context,
            sampler,
            ends=self._ids,
            least=least,
            probe=probe,
            attention_mask=attention_mask,
            penalize_prompt=penalize_prompt,
        )
        self._context = context
        self._grammar = constrain if isinstance(constrain, Grammar) else None  # compiled before the first pass
        self._said = Transcript(context.engine, strings, None if isinstance(constrain, Grammar) else constrain)
        self._seen: object = None  # the context as the last step left it; None before the first
        self._ahead = Lookahead(context, self._said, self._ids)
        self.finish: str | None = None

    @property
    def context(self) -> Context:
        """The context it writes to."""
        return self._context

    @property
    def seed(self) -> int:
        """What its draws are a function of, with the position."""
        return self._how.seed

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens so far: drawn, forced or accepted, and not cut since."""
        self._follow()
        return tuple(self._said.generated)

    # -- running ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        if self.finish is not None:
            raise StopAsyncIteration
        if self._ahead.is_there:
            job, token = self._ahead.follow()
            if job is not None:
                token = await self._coming(job) if token is None else token
                if token is not None:
                    return self._told(token)
                self._come_back()  # nothing may follow the last one
        await self._compile_beside()
        turn = self._ahead.claim()
        if turn is None:
            self._follow()
            if (over := self._over()) is not None:
                return self._end(over)
            if forced := self.forced():
                return self._put(forced)
            turn = self._how.prepared(self._context, self._said).execute()
        if self._left > 1 and self._can_run_ahead():
            self._run_ahead(turn)
        out = await self._outcome(turn)
        return self._drawn(out.token(turn.token), probed(out, turn.probe))

    async def tokens(self) -> list[int]:
        """Run to the end; all tokens that stayed."""
        async for _ in self:
            pass
        return list(self._said.generated)

    async def text(self) -> str:
        """Run to the end; the whole text."""
        self._check_text()
        async for _ in self:
            pass
        return self._said.whole()

    async def json(self, schema: Any = None) -> Any:
        """Run to the end; the text as JSON. With a schema (dict, text, pydantic model) only such a text can come.

        A pydantic model class means its own fields only, and gives an object of it.
        """
        self._check_text()
        if schema is not None:
            begun = self._said.generated or self._ahead.is_there or self.finish is not None
            if begun or self._said.constraint is not None or self._grammar is not None:
                raise InvalidInput("a schema can be given to json() before the first step, and to no other constraint")
            self._grammar = Grammar.json_schema(schema)
        return parse_json(await self.text(), self.finish, schema)

    def _check_text(self) -> None:
        """Raise before anything is computed where tokens have no text."""
        if not self._context.engine.has_tokenizer:
            raise Unsupported("this model has no tokenizer, so its tokens have no text; collect them with tokens()")

    # -- by hand ---------------------------------------------------------------------------------------------------

    def accept(self, tokens: Iterable[int]) -> Step:
        """Put tokens in by hand, as if they had been drawn: they go through the constraint, the text and the stops.

        A token that the constraint forbids, more tokens than max_tokens leaves and tokens behind a stop raise, and
        nothing has changed then. Nothing is computed: the tokens wait in the pending buffer.
        """
        self._go_on()
        ids = token_ids(tokens, self._context.engine.vocab_size)
        self._compile()
        ends = [i for i, token in enumerate(ids) if token in self._ids]
        if not ends:
            return self._put(ids, whole=True)
        end, first = ids[ends[0]], ids[: ends[0]]
        if len(first) < len(ids) - 1:
            raise InvalidInput(f"token {end} ends the generation and {len(ids) - 1 - len(first)} tokens follow it")
        if len(self._said.generated) + len(first) < self._how.least:
            raise InvalidInput(f"token {end} would end the generation before min_tokens ({self._how.least})")
        step = self._put(first, whole=True, end=end)
        return self._end(self._reason(end), step)

    async def prepare(self) -> Prepared:
        """The next step, to be taken by hand: a pass with the generation's masks, sampler and probe that draws a token.

        Tokens that the constraint forces need no pass: `gen.accept(gen.forced())`.
        """
        self._go_on()
        await self._compile_beside()
        if (over := self._over()) is not None:
            raise Closed(f"no step is left to prepare: the next one only ends the generation ({over})")
        prepared = self._how.prepared(self._context, self._said)
        return replace(prepared, mark=self._seen, taken=self._take)

    def forced(self) -> list[int]:
        """Tokens that the constraint leaves no choice about: fed together, without a pass for each."""
        self._rest()
        self._compile()
        tokens = self._said.forced()[: self._left]
        ends = [i for i, token in enumerate(tokens) if token in self._ids]
        return tokens[: ends[0]] if ends else tokens

    def fork(self, *, seed: int | None = None) -> Generation:
        """A second generation that goes on from here, on a fork of the context: `.context`, which is the caller's.

        Explicit seeds come along, so the same tokens follow, unless `seed` gives another one; without, the fork draws
        with fresh entropy. A constraint is copied; one without `copy()` raises.
        """
        self._ahead.check_idle()
        self._follow()
        context = self._context.fork()  # first: nobody is at work on the constraint of an idle context
        try:
            said = self._said.fork()
        except BaseException:
            context.release()
            raise
        twin = copy(self)
        twin._context, twin._said, twin._ahead = context, said, self._ahead.fork(context, said)
        twin._seen = None if self._seen is None else twin._marked()
        return twin.reseed(seed) if seed is not None or not self._how.seeded else twin

    def reseed(self, seed: int | None = None) -> Self:
        """Draw the tokens that follow with another seed, or with fresh entropy.

        A draw is a function of the seed and the position: a token that was cut comes again unless something changes.
        """
        self._rest()
        self._how = self._how.reseeded(seed)
        return self

    def resume(self, max_tokens: int | None = None) -> Self:
        """Go on after an end, with the context as it is now and `max_tokens` more tokens, or those that were left."""
        more = None if max_tokens is None else _count(max_tokens)
        self._follow()
        if more is not None:
            self._most = len(self._said.generated) + more
        if self.finish is not None:
            self._said.reopen()
            self.finish = None
        return self

    # -- in step with the context ----------------------------------------------------------------------------------

    @property
    def _left(self) -> int:
        return self._most - len(self._said.generated)

    def _go_on(self) -> None:
        """Ready for something by hand: not over, no pass ahead, in step with the context."""
        if self.finish is not None:
            raise Closed(f"this generation ended ({self.finish}); call resume() to go on")
        self._rest()
        self._follow()

    def _rest(self) -> None:
        """Take the pass ahead back."""
        with self._context.engine.lock:
            self._ahead.check_idle()
            self._come_back()

    def _come_back(self) -> None:
        """What the context calls when somebody looks at it between two steps."""
        if self._ahead.is_there:
            self._retract(self._ahead.fed)

    def _retract(self, token: int | None) -> None:
        """Take the pass ahead back; its token waits in the pending buffer instead."""
        with self._context.engine.lock:
            self._ahead.take_back()
            if token is not None:
                self._context.fill([token])
            self._seen = self._marked()

    def _marked(self) -> object:
        """What stays equal as long as nobody changes the context."""
        with self._context.engine.lock:
            pending = self._context.pending  # first: it takes back what another generation runs ahead
            return self._context.table.stamp, pending

    def _follow(self) -> None:
        """Notice what the program has done to the context since the last step."""
        if self._ahead.is_there:  # nothing: its pass would have been taken back
            return
        mark, before = self._marked(), self._seen
        if mark == before:
            return
        self._seen = mark
        if before is None:
            self._said.begin(self._context.tokens)
        else:
            self._said.follow(self._context.tokens)

    # -- one step --------------------------------------------------------------------------------------------------

    def _over(self) -> str | None:
        """Why no pass can follow, if none can."""
        if self._said.finished:
            return "constraint"
        # A last token at the limit of positions cannot be computed.
        return "length" if self._left <= 0 or (self._said.generated and self._context.room() < 0) else None

    def _compile(self) -> None:
        """Have the grammar's constraint. The first time it may take a second, in the caller's thread."""
        if self._grammar is not None:
            engine = self._context.engine
            self._said.constraint = compile_grammar(self._grammar, engine.tokenizer, engine.vocab_size)
            self._grammar = None

    async def _compile_beside(self) -> None:
        """The same beside the event loop."""
        if (grammar := self._grammar) is not None:
            engine = self._context.engine
            made = await compile_async(grammar, engine.tokenizer, engine.vocab_size)
            if self._grammar is grammar:  # else somebody needed it sooner
                self._said.constraint, self._grammar = made, None

    def _can_run_ahead(self) -> bool:
        """Whether the next pass can be built before this one's token is known."""
        return self._ahead.can_follow() and not self._how.sampler.penalizes and self._context.room() > 1

    def _run_ahead(self, turn: Turn) -> None:
        """Queue the next pass with the token that this one draws, so that the device never waits for the program.

        Where it takes nothing but the token, it repeats itself from then on.
        """
        # What stands in its way will be said in its own turn, or by this turn's outcome if that has failed already.
        with suppress(OutOfPages, TokenBudgetExceeded, DeadlineExceeded, PassFailed), self._context.engine.lock:
            left = min(self._left, self._context.room()) - 1
            self._ahead.start(self._how.prepared(self._context, self._said, turn.token, self._ahead.mask()))
            if self._how.repeats(self._context, self._said):
                self._ahead.decode(self._how.attention, left)

    async def _coming(self, job: Job) -> int | None:
        """The next token of a streak; on an error the context is as it was behind the last."""
        try:
            return await self._ahead.coming(job)
        except BaseException as error:
            with suppress(Closed, ContextBusy, PassFailed), self._context.engine.lock:
                if self._ahead.is_untouched():
                    self._come_back()
                else:  # it has failed, and somebody has changed the context before this was heard of
                    self._retract(None)
                    self._seen = ()
            if isinstance(error, CancelledError):
                raise asyncio.CancelledError from None
            raise

    def _told(self, token: int) -> Step:
        """The step that a token of a streak makes."""
        if token in self._ids:
            self._retract(None)
            return self._end(self._reason(token), Step((), ""))
        self._said.add(token, accepted=self._ahead.has_accepted())
        if self._said.stopped or self._left <= 0 or self._ahead.is_spent:
            self._retract(token)
        else:
            self._context.retract = self._come_back
        return self._step([token])

    async def _outcome(self, turn: Turn) -> Output:
        try:
            return await turn.execution
        except BaseException:
            self._ahead.undone()
            self._put_back()
            raise

    def _put_back(self) -> None:
        """A pass was undone that was fed with the last token: the token waits in the pending buffer, as it would have
        without a pass ahead. A context that is gone, or that somebody has changed meanwhile, is left alone."""
        with suppress(Closed, ContextBusy, PassFailed), self._context.changing():
            if self._said.lacks_last(self._context.tokens):
                self._context.fill([self._said.generated[-1]])
                self._seen = self._marked()

    async def _take(self, prepared: Prepared) -> Step:
        self._go_on()
        if prepared.mark != self._seen:
            raise Closed("the context was changed since this step was prepared; prepare another one")
        out = await prepared.forward.execute()
        return self._drawn(out.token(prepared.token), probed(out, prepared.probe))

    # -- what became of it -----------------------------------------------------------------------------------------

    def _drawn(self, token: int, probes: tuple[Any, ...]) -> Step:
        """The step that a token makes which a pass has drawn."""
        if token in self._ids:
            self._retract(None)
            return self._end(self._reason(token), Step((), "", probes))
        kept = None
        try:
            self._said.add(token, accepted=self._ahead.accepts())
            kept = token
            if self._left > 0:
                self._ahead.observe()
            alone = not self._ahead.is_there or self._said.stopped or self._is_finished
        except BaseException:  # the grammar has come to nothing: whoever asks again is told so again
            self._retract(kept)
            raise
        if alone:
            self._retract(token)
        else:
            self._context.retract = self._come_back
        return self._step([token], probes)

    def _put(self, ids: list[int], *, whole: bool = False, end: int | None = None) -> Step:
        """Add tokens that were not drawn, up to a stop string; with `whole` one before the last is refused."""
        if len(ids) > self._left:
            raise InvalidInput(f"{len(ids)} tokens were given; max_tokens leaves room for {self._left}")
        with self._said.adding(ids, whole=whole, behind=end is not None) as taken:
            if end is not None and not self._said.may_end:
                raise InvalidInput(f"token {end} would end the generation and the constraint does not allow that here")
            self._context.fill(taken)
        self._seen = self._marked()
        return self._step(taken)

    def _step(self, tokens: list[int], probes: tuple[Any, ...] = ()) -> Step:
        """The step that these tokens make, the last one if they end it."""
        if self._said.stopped:
            surplus = self._said.stop()
            self._context.truncate(surplus)
            self._seen = self._marked()
            return self._end("stop", Step(tuple(tokens[: max(0, len(tokens) - surplus)]), "", probes))
        text, retracted = self._said.say()
        step = Step(tuple(tokens), text, probes, retracted=retracted)
        if self._is_finished:
            return self._end("constraint", step)
        return self._end("length", step) if self._left <= 0 else step

    @property
    def _is_finished(self) -> bool:
        """Whether the constraint allows nothing behind the last token.

        A grammar tells by its next mask, which nobody needs where max_tokens ends a text that is not complete.
        """
        said = self._said
        if self._ahead.has_grammar or (
            self._left <= 0 and isinstance(said.constraint, GrammarMatcher) and not said.may_end
        ):
            return False
        return said.finished

    def _end(self, why: str, step: Step | None = None) -> Step:
        """The last step: it says the text that was held."""
        self.finish = why
        self._said.close()
        text, retracted = self._said.say()
        step = step or Step((), "")
        return replace(step, text=step.text + text, finish=why, retracted=step.retracted + retracted)

    def _reason(self, token: int) -> str:
        return "eos" if token in self._context.engine.eos_ids else "stop"


def _count(max_tokens: int) -> int:
    (count,) = integers([max_tokens], "max_tokens")
    if count < 1:
        raise InvalidInput(f"max_tokens is {max_tokens}; it takes a whole number from 1")
    return count


def _refuse(**later: object) -> None:
    for name, value in later.items():
        if value is not None:
            raise Unsupported(
                f"{name}={short_repr(value)} was given; generate does not support {name} yet, leave it out"
            )
