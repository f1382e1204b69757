"""Several continuations of one context: beams, or independent draws. Written with what every program has.

    ctx.generate(num_beams=4)                       ─▶ beam_search on forks, the best one continues in the context
    ctx.generate(sampler, num_return_sequences=3)   ─▶ draw 0 in the context itself, draws 1 and 2 in forks of it

`started` is the second half of `ctx.generate`: it turns settled parameters into a `Generation`, or into `Generations`
where there may be several. Forks are released when the last sequence has ended, or on the way out of an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from headway.base.errors import Closed, InvalidInput, Unsupported
from headway.base.masks import Mask
from headway.base.probes import Probe
from headway.base.rng import WORD, philox
from headway.program.constraints.constraint import Constraint, check_constraint
from headway.program.constraints.grammar import Grammar
from headway.program.generation.beam_choices import Continuation
from headway.program.generation.beams import beam_search
from headway.program.generation.generator import Generation
from headway.program.generation.ngrams import Unrepeating, copied
from headway.program.generation.parameters import Parameters
from headway.program.generation.steps import Prepared, Step

if TYPE_CHECKING:
    from headway.program.context import Context


@dataclass(frozen=True, eq=False)
class Request:
    """What a call asks for beside its parameters."""

    stop: Sequence[str | int]
    stop_only: bool
    constrain: Grammar | Constraint | None
    probe: Probe | None
    attention_mask: Mask | None
    adapter: Any
    speculate: Any
    penalize_prompt: bool = True

    def options(self) -> dict[str, Any]:
        """What a generation takes as it is."""
        names = ("stop", "stop_only", "probe", "attention_mask", "adapter", "speculate", "penalize_prompt")
        return {name: getattr(self, name) for name in names}


def started(context: Context, parameters: Parameters, request: Request, *, several: bool) -> Generation:
    """The generation that was asked for; `Generations` where `several` or where the parameters say so."""
    check_constraint(request.constrain)
    new = set(parameters.ends).difference(context.engine.eos_ids)
    if new and not request.stop_only:
        request = replace(request, stop=[*request.stop, *sorted(new)])
    if several or parameters.num_beams > 1 or parameters.num_return_sequences > 1:
        return Generations(context, parameters, request)
    return _single(context, parameters, request)


class Generations(Generation):
    """Several continuations of one context, found together; what `num_beams` or `num_return_sequences` gives.

        found = ctx.generate(num_beams=4, num_return_sequences=2, max_tokens=20)
        print(await found.texts())            # best first; without beams, in the order of their seeds
        best, second = await found.sequences()
        print(best.score, second.tokens)

    The first one continues in the context itself, as if it had been generated alone: `text()`, `tokens()`, `json()` and
    the single step of an `async for` are about it. It all runs when the first of these is awaited; on an error, or when
    cancelled, the context has the tokens it had and no page stays behind.
    """

    def __init__(self, context: Context, parameters: Parameters, request: Request) -> None:
        _check_request(parameters, request)
        lengths = {"max_tokens": parameters.max_tokens, "min_tokens": parameters.min_tokens}
        super().__init__(context, parameters.sampler, **lengths, **request.options())
        self._parameters, self._request = parameters, request
        self._found: list[Continuation] | None = None
        self._before = 0  # tokens of the context when it began
        self._stepped = False

    async def sequences(self) -> list[Continuation]:
        """Run to the end; every sequence with its tokens, text, score, finish and seed, the best first.

        Beams may be fewer than asked for, when so many with any probability do not exist.
        """
        if self._found is None:
            self._before = len(self.context.tokens)
            search = self._search if self._parameters.num_beams > 1 else self._draw
            self._found = await search()
            self.finish = self._found[0].finish
        return list(self._found)

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
        home, request = self.context, self._request
        if others and (request.attention_mask is not None or request.adapter is not None):
            raise Unsupported(
                "contexts() cannot write tokens that were generated under an attention_mask or an adapter; "
                "fork the context before, and generate in each fork"
            )
        if home.tokens[self._before :] != first.tokens:
            raise InvalidInput("the context was changed since its sequences were found; ask for contexts() before")
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
            if self._found is not None or self._request.constrain is not None:
                raise InvalidInput("a schema can be given to json() before the first step, and to no other constraint")
            request = replace(self._request, constrain=Grammar.json_schema(schema))
            _check_request(self._parameters, request)
            self._request = request
        return await super().json()

    @property
    def generated(self) -> tuple[int, ...]:
        """The first sequence's tokens; none before it all has run."""
        return () if self._found is None else self._found[0].tokens

    async def __anext__(self) -> Step:
        """The first sequence, as one step."""
        if self._stepped:
            raise StopAsyncIteration
        first, *_ = await self.sequences()
        self._stepped = True
        return Step(first.tokens, first.text, first.probes, first.finish)

    def accept(self, tokens: Iterable[int]) -> Step:
        """Refused: there is no one sequence to put tokens into."""
        raise self._by_hand("accept")

    async def prepare(self) -> Prepared:
        """Refused: there is no one step to take."""
        raise self._by_hand("prepare")

    def forced(self) -> list[int]:
        """Refused: each sequence has its own."""
        raise self._by_hand("forced")

    def resume(self, max_tokens: int | None = None) -> Self:
        """Refused: the context has the first sequence, from which `ctx.generate` goes on."""
        raise self._by_hand("resume")

    def _by_hand(self, verb: str) -> Unsupported:
        return Unsupported(
            f"{verb}() steers one sequence, and num_beams or num_return_sequences ask for several at once; "
            "fork the context and generate in each fork"
        )

    async def _search(self) -> list[Continuation]:
        own, what, request = self._parameters, self._parameters.sampler, self._request
        drawing: dict[str, Any] = {}
        if own.draws:
            knobs = {"temperature": what.temperature, "top_k": what.top_k, "top_p": what.top_p}
            drawing = {"do_sample": True, "seed": self.seed, **knobs}
        return await beam_search(
            self.context,
            num_beams=own.num_beams,
            max_tokens=own.max_tokens,
            min_tokens=own.min_tokens,
            length_penalty=own.length_penalty,
            early_stopping=own.early_stopping,
            num_return_sequences=own.num_return_sequences,
            repetition_penalty=what.repetition_penalty,
            no_repeat_ngram_size=own.no_repeat_ngram_size,
            eos_ids=() if request.stop_only else None,
            stop_ids=[stop for stop in request.stop if not isinstance(stop, str)],
            attention_mask=request.attention_mask,
            adapter=request.adapter,
            adopt=True,
            **drawing,
        )

    async def _draw(self) -> list[Continuation]:
        """Independent draws. The prompt is computed first, once, so that the forks share its pages."""
        home, request, count = self.context, self._request, self._parameters.num_return_sequences
        constraints = [request.constrain, *(copied(request.constrain) for _ in range(count - 1))]
        if count > 1 and home.pending:
            await home.flush(request.attention_mask, request.adapter)
        forks: list[Context] = []
        try:
            forks += [home.fork() for _ in range(count - 1)]
            return await _together([self._one(i, c, r) for i, (c, r) in enumerate(zip([home, *forks], constraints))])
        except BaseException:
            with suppress(Closed):
                home.truncate(len(home.tokens) - self._before)
            raise
        finally:
            for fork in forks:
                fork.release()

    async def _one(self, number: int, context: Context, constrain: Grammar | Constraint | None) -> Continuation:
        """The draw with this number, which has a seed of its own."""
        seed = derived_seed(self.seed, number)
        parameters = replace(self._parameters, sampler=replace(self._parameters.sampler, seed=seed))
        generation = _single(context, parameters, replace(self._request, constrain=constrain))
        probes = [value async for step in generation for value in step.probes]
        tokens = tuple(await generation.tokens())
        text = await generation.text() if context.engine.has_tokenizer else ""
        assert generation.finish is not None
        drawn = seed if self._parameters.draws else None
        return Continuation(tokens, text, generation.finish, seed=drawn, probes=tuple(probes))


def derived_seed(seed: int, number: int) -> int:
    """The seed of one of several draws: the first has the seed itself."""
    if number == 0:
        return seed
    # No draw of a token has this ordinal, so none has these bits.
    high, low, _, _ = philox((number & WORD, number >> 32, WORD, WORD), (seed & WORD, seed >> 32))
    return high << 32 | low


def _single(context: Context, parameters: Parameters, request: Request) -> Generation:
    """One sequence, in this context."""
    lengths = {"max_tokens": parameters.max_tokens, "min_tokens": parameters.min_tokens}
    options: dict[str, Any] = {**lengths, **request.options()}
    if parameters.no_repeat_ngram_size == 0:
        return Generation(context, parameters.sampler, constrain=request.constrain, **options)
    return Unrepeating(context, parameters.sampler, parameters.no_repeat_ngram_size, request.constrain, **options)


async def _together(work: Iterable[Coroutine[Any, Any, Continuation]]) -> list[Continuation]:
    """The results of all, in order; when one fails the others are cancelled and have ended before it is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _check_request(parameters: Parameters, request: Request) -> None:
    """Raise where a request asks for what several sequences, or beams, cannot have."""
    if parameters.num_beams == 1:
        return
    strings = [stop for stop in request.stop if isinstance(stop, str)]
    found = {"constrain": request.constrain, "probe": request.probe, "speculate": request.speculate}
    found["stop strings"] = strings or None
    found["penalize_prompt=False"] = None if request.penalize_prompt else False
    for name, value in found.items():
        if value is not None:
            hint = "; token ids can stop beams" if name == "stop strings" else ""
            beams = f"num_beams={parameters.num_beams}"
            raise Unsupported(f"{name} cannot be given with {beams}; leave one of them out{hint}")
