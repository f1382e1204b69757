"""Several continuations of one context: beams, or independent draws. Written with the public API alone.

    ctx.generate(num_beams=4)                       ─▶ beam_search on forks, the best one continues in the context
    ctx.generate(sampler, num_return_sequences=3)   ─▶ draw 0 in the context itself, draws 1 and 2 in forks of it

`start` is the second half of `ctx.generate`: it turns settled parameters into a `Generation`, or into `Generations`
where there may be several. Forks are released when the last sequence has ended, and on errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self

from headway.base.errors import Closed, InvalidInput, Unsupported
from headway.base.rng import WORD, philox
from headway.base.specs.probes import Value_co
from headway.program.constraints.constraint import Constraint
from headway.program.constraints.grammar import Grammar
from headway.program.generation.generator import Generation
from headway.program.generation.ngrams import copied
from headway.program.generation.parameters import Parameters
from headway.program.generation.sequences.beams import Continuation, beam_search, together
from headway.program.generation.steps import Prepared, Step, not_an_end
from headway.program.generation.stops import parse_json

if TYPE_CHECKING:
    from headway.program.context import Context


def start(context: Context, parameters: Parameters, *, several: bool) -> Generation | Generations:
    """The generation of these parameters; `Generations` if `several`, or if they ask for more than one sequence."""
    if several or parameters.num_beams > 1 or parameters.num_return_sequences > 1:
        return Generations(context, parameters)
    return _single(context, parameters)


class Generations(Generic[Value_co]):
    """Several continuations of one context, generated together: what `num_beams` or `num_return_sequences` gives.

        beams = ctx.generate(num_beams=4, num_return_sequences=2, max_tokens=20)
        print(await beams.texts())            # best first; without beams, in the order of their seeds
        best, second = await beams.sequences()
        print(best.score, second.tokens)

    The first one continues in the context itself, as if it had been generated alone: `text()`, `tokens()`, `json()` and
    the single step of an `async for` are about it. Everything runs when the first of these is awaited. On an error, or
    when cancelled, the context has the tokens it had before and no page stays held.
    """

    def __init__(self, context: Context, parameters: Parameters) -> None:
        self._parameters = parameters
        self._first = _single(context, replace(parameters, constrain=None, no_repeat_ngram_size=0))  # never run
        self._sequences: list[Continuation[Value_co]] | None = None
        self._before = 0  # tokens of the context when it began
        self._stepped = False

    @property
    def context(self) -> Context:
        """The context that the first sequence continues."""
        return self._first.context

    @property
    def seed(self) -> int:
        """The seed of the first sequence; those of the others are derived from it."""
        return self._first.seed

    @property
    def finish(self) -> str | None:
        """Why the first sequence ended; None before everything has run."""
        return None if self._sequences is None else self._sequences[0].finish

    @property
    def generated(self) -> tuple[int, ...]:
        """The first sequence's tokens; none before everything has run."""
        return () if self._sequences is None else self._sequences[0].tokens

    def __repr__(self) -> str:
        own = self._parameters
        kind = f"num_beams={own.num_beams}" if own.num_beams > 1 else f"seed={self.seed}"
        state = f"finish={self.finish!r}" if self._sequences is not None else "not run yet"
        return f"<Generations of {own.num_return_sequences}, {kind}, max_tokens={own.max_tokens}, {state}>"

    async def sequences(self) -> list[Continuation[Value_co]]:
        """Run to the end; every sequence with its tokens, text, score, finish and seed, the best first.

        A beam search may find fewer than were asked for, when no more have any probability.
        """
        if self._sequences is None:
            self._before = len(self.context.tokens)
            search = self._search if self._parameters.num_beams > 1 else self._draw
            try:
                self._sequences = await search()
            except StopAsyncIteration as error:
                raise not_an_end() from error
        return list(self._sequences)

    async def texts(self) -> list[str]:
        """Run to the end; the text of every sequence, the best first."""
        self._check_text()
        return [one.text for one in await self.sequences()]

    async def contexts(self) -> list[Context]:
        """Run to the end; a context for every sequence. The first is the context itself, the others are new.

        A new one shares the prompt's pages and has its sequence pending: what the prefix cache still has of it is not
        computed again. They are the caller's to release.
        """
        first, *others = await self.sequences()
        home = self.context
        if others and (self._parameters.attention_mask is not None or self._parameters.adapter is not None):
            raise Unsupported(
                "contexts() cannot write tokens that were generated under an attention_mask or an adapter; "
                "fork the context before, and generate in each fork"
            )
        if home.tokens[self._before :] != first.tokens:
            raise InvalidInput("the context has changed since its sequences were generated; call contexts() before")
        return [home, *(home.fork().truncate(len(first.tokens)).fill(one.tokens) for one in others)]

    async def tokens(self) -> list[int]:
        """Run to the end; the first sequence's tokens."""
        return list((await self.sequences())[0].tokens)

    async def text(self) -> str:
        """Run to the end; the first sequence's text."""
        self._check_text()
        return (await self.sequences())[0].text

    async def json(self, schema: Any = None) -> Any:
        """Run to the end; the first sequence's text as JSON. With a schema every sequence follows it."""
        self._check_text()
        if schema is not None:
            if self._sequences is not None or self._parameters.constrain is not None:
                raise InvalidInput("give json() a schema before the first step, and only without another constraint")
            grammar = schema if isinstance(schema, Grammar) else Grammar.json_schema(schema)
            self._parameters = replace(self._parameters, constrain=grammar)
        return parse_json(await self.text(), self.finish, schema)

    def __aiter__(self) -> AsyncIterator[Step[Value_co]]:
        return self

    async def __anext__(self) -> Step[Value_co]:
        """The first sequence, as one step."""
        if self._stepped:
            raise StopAsyncIteration
        first, *_ = await self.sequences()
        self._stepped = True
        return Step(first.tokens, first.text, first.probes, first.finish)

    def fork(self, *, seed: int | None = None) -> Generations[Value_co]:
        """The same on a fork of the context, with the same seed if it was given explicitly, or with `seed`."""
        twin = copy(self)
        twin._first = self._first.fork(seed=seed)
        return twin

    def reseed(self, seed: int | None = None) -> Self:
        """Draw with another seed, or with fresh entropy."""
        self._first.reseed(seed)
        return self

    def accept(self, tokens: Iterable[int]) -> Step[Value_co]:
        """Refused: there is no single sequence to put tokens into."""
        raise self._not_one("accept")

    async def prepare(self) -> Prepared[Value_co]:
        """Refused: there is no single step to take."""
        raise self._not_one("prepare")

    def forced(self) -> list[int]:
        """Refused: each sequence has its own."""
        raise self._not_one("forced")

    def resume(self, max_tokens: int | None = None) -> Self:
        """Refused: the context has the first sequence, and `ctx.generate` continues it."""
        raise self._not_one("resume")

    def _not_one(self, verb: str) -> Unsupported:
        return Unsupported(
            f"{verb}() steers one sequence, and num_beams or num_return_sequences ask for several at once; "
            "fork the context and generate in each fork"
        )

    def _check_text(self) -> None:
        if not self.context.engine.has_tokenizer:
            raise Unsupported("this model has no tokenizer, so its tokens have no text; collect them with tokens()")

    async def _search(self) -> list[Continuation[Any]]:
        own, sampler = self._parameters, self._parameters.sampler
        drawing: dict[str, Any] = {}
        if own.draws:
            drawing = {"do_sample": True, "seed": self.seed}
            drawing |= {name: getattr(sampler, name) for name in ("temperature", "top_k", "top_p")}
        return await beam_search(
            self.context,
            num_beams=own.num_beams,
            max_tokens=own.max_tokens,
            min_tokens=own.min_tokens,
            length_penalty=own.length_penalty,
            early_stopping=own.early_stopping,
            num_return_sequences=own.num_return_sequences,
            repetition_penalty=sampler.repetition_penalty,
            no_repeat_ngram_size=own.no_repeat_ngram_size,
            eos_ids=() if own.stop_only else None,
            stop_ids=[stop for stop in own.stop if not isinstance(stop, str)],
            stop=[stop for stop in own.stop if isinstance(stop, str)],
            constrain=own.constrain,
            probe=own.probe,
            attention_mask=own.attention_mask,
            adapter=own.adapter,
            words=own.words,
            logits=own.logits,
            adopt=True,
            **drawing,
        )

    async def _draw(self) -> list[Continuation]:
        """Independent draws. The prompt is computed first, once, so that the forks share its pages."""
        home, own, count = self.context, self._parameters, self._parameters.num_return_sequences
        constraints = [own.constrain, *(copied(own.constrain) for _ in range(count - 1))]
        if count > 1 and home.pending:
            await home.flush(own.attention_mask, own.adapter)
        forks: list[Context] = []
        try:
            forks += [home.fork() for _ in range(count - 1)]
            return await together([self._one(i, c, r) for i, (c, r) in enumerate(zip([home, *forks], constraints))])
        except BaseException:
            with suppress(Closed):
                home.truncate(len(home.tokens) - self._before)
            raise
        finally:
            for fork in forks:
                fork.release()

    async def _one(self, number: int, context: Context, constrain: Grammar | Constraint | None) -> Continuation:
        """The draw with this number, which has its own seed."""
        seed = derived_seed(self.seed, number)
        sampler = replace(self._parameters.sampler, seed=seed)
        generation = _single(context, replace(self._parameters, sampler=sampler, constrain=constrain))
        probes = [value async for step in generation for value in step.probes]
        tokens = tuple(await generation.tokens())
        text = await generation.text() if context.engine.has_tokenizer else ""
        assert generation.finish is not None
        drawn = seed if self._parameters.draws else None
        return Continuation(tokens, text, generation.finish, seed=drawn, probes=tuple(probes))


def derived_seed(seed: int, number: int) -> int:
    """The seed of one of several draws; the first has the seed itself."""
    if number == 0:
        return seed
    # No draw of a token has this ordinal, so none has these bits.
    high, low, _, _ = philox((number & WORD, number >> 32, WORD, WORD), (seed & WORD, seed >> 32))
    return high << 32 | low


def _single(context: Context, parameters: Parameters) -> Generation:
    """One sequence, in this context."""
    names = ("max_tokens", "min_tokens", "stop", "stop_only", "constrain", "probe", "attention_mask", "penalize_prompt")
    names += ("no_repeat_ngram_size", "speculate", "verify", "adapter", "words", "prepare", "logits", "rules")
    options: dict[str, Any] = {name: getattr(parameters, name) for name in names}
    return Generation(context, parameters.sampler, **options)
