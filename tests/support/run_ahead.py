"""Generations with run-ahead decoding, held against the same ones step by step: for the CPU and for CUDA devices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import headway as hw
from headway.runtime.batch import Batch
from headway.runtime.runners.base import InFlight

SAMPLERS: list[Callable[[int], hw.Sampler]] = [
    lambda i: hw.Argmax(),
    lambda i: hw.Multinomial(0.8, seed=i),
    lambda i: hw.TopK(5, seed=i),
    lambda i: hw.TopP(0.7, seed=i),
    lambda i: hw.MinP(0.05, seed=i),
    lambda i: hw.TopKTopP(8, 0.9, temperature=0.7, seed=i),
]


@dataclass
class Steps:
    """What the steps of an engine had."""

    rows: list[int] = field(default_factory=list)  # decode rows, of steps that have some
    mixed: int = 0  # steps with decode rows and chunks of passes


@contextmanager
def watched(engine: hw.Engine) -> Iterator[Steps]:
    """Count the decode rows of an engine."""
    runner, steps = engine._loop._runner, Steps()
    begin = runner.begin

    def counted(batch: Batch) -> InFlight:
        if batch.decode is not None:
            steps.rows.append(batch.decode_count)
            steps.mixed += bool(batch.segments)
        return begin(batch)

    runner.begin = counted  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del runner.begin  # type: ignore[attr-defined]


def prompt(i: int, vocab: int) -> list[int]:
    return random.Random(i).choices(range(vocab), k=3 + 7 * (i % 6))


async def by_hand(context: hw.Context, sampler: hw.Sampler, **options: Any) -> tuple[list[int], str | None]:
    """A generation in steps that are never ahead of it."""
    generation = context.generate(sampler, **options)
    while generation.finish is None:
        try:
            await (await generation.prepare()).take()
        except hw.Closed:
            await generation.tokens()
    return list(generation.generated), generation.finish


async def run_ahead(context: hw.Context, sampler: hw.Sampler, **options: Any) -> tuple[list[int], str | None]:
    generation = context.generate(sampler, **options)
    return await generation.tokens(), generation.finish


async def alike(engine: hw.Engine, count: int = 13, **options: Any) -> None:
    """Many generations at once, of several lengths and samplers, are what each is by itself; so are their contexts."""
    limits = [5 + 9 * (i % 5) for i in range(count)]

    async def one(i: int, way: Callable[..., Any]) -> tuple[Any, tuple[int, ...]]:
        async with engine.context().fill(prompt(i, engine.vocab_size)) as context:
            found = await way(context, SAMPLERS[i % 6](i), max_tokens=limits[i], stop_only=True, **options)
            return found, context.tokens

    alone = [await one(i, by_hand) for i in range(count)]
    assert await asyncio.gather(*(one(i, run_ahead) for i in range(count))) == alone
    assert [len(tokens) for (tokens, _), _ in alone] == limits


async def ends(engine: hw.Engine) -> None:
    """An end token ends a generation, whatever was started after it, and the context stands before it."""

    async def one(i: int) -> None:
        ids = prompt(i, engine.vocab_size)
        async with engine.context().fill(ids) as free:
            tokens, _ = await run_ahead(free, SAMPLERS[1 + i % 5](i), max_tokens=40, stop_only=True)
        for at in (0, 1, 2, 17, 39):
            stop = tokens[at]
            first = tokens.index(stop)
            async with engine.context().fill(ids) as context:
                got = await run_ahead(context, SAMPLERS[1 + i % 5](i), max_tokens=40, stop_only=True, stop=[stop])
                assert got == (tokens[:first], "stop")
                assert list(context.tokens) == [*ids, *tokens[:first]]
                more, _ = await run_ahead(context.fill(tokens[first : first + 1]), hw.Argmax(), max_tokens=3)
                assert len(more) <= 3

    await asyncio.gather(*(one(i) for i in range(7)))


async def steered(engine: hw.Engine, seed: int) -> None:
    """Whatever a program does to its contexts between steps, the tokens that follow are those of a fresh context."""
    dice = random.Random(seed)

    async def one(i: int) -> None:
        ids = prompt(i, engine.vocab_size)
        context = engine.context().fill(ids)
        generation = context.generate(hw.Argmax(), max_tokens=60, stop_only=True)
        for _ in range(30):
            match dice.randrange(8):
                case 0 if len(generation.generated) > 2:
                    context.truncate(dice.randrange(1, len(generation.generated)))
                case 1:
                    context.fill([dice.randrange(engine.vocab_size)])
                case 2:
                    with context.fork() as twin:
                        assert twin.tokens == context.tokens
                case 3:
                    assert context.seq_len + len(context.pending) == len(context.tokens)
                case 4:
                    task = asyncio.ensure_future(anext(generation))
                    for _ in range(dice.randrange(4)):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                case _:
                    for _ in range(dice.randrange(1, 9)):
                        if generation.finish is None:
                            await anext(generation)
            if dice.random() < 0.1:
                await asyncio.sleep(0.002)
            if generation.finish is not None:
                break
        async with engine.context().fill(list(context.tokens)) as fresh:
            expected, _ = await by_hand(fresh, hw.Argmax(), max_tokens=4, stop_only=True)
        assert (await run_ahead(context, hw.Argmax(), max_tokens=4, stop_only=True))[0] == expected
        context.release()

    await asyncio.gather(*(one(i) for i in range(9)))


async def abandoned(engine: hw.Engine, seed: int) -> None:
    """Programs that end anywhere, cancelled or with their contexts released, leave nothing and disturb nobody."""
    dice = random.Random(seed)

    async def wild(i: int) -> None:
        context = engine.context().fill(prompt(i, engine.vocab_size))
        generation = context.generate(hw.Multinomial(seed=i), max_tokens=200, stop_only=True)
        for _ in range(dice.randrange(40)):
            await anext(generation)
        if dice.random() < 0.5:
            context.release()

    async def calm(i: int) -> None:
        ids = prompt(i, engine.vocab_size)
        async with engine.context().fill(ids) as one, engine.context().fill(ids) as two:
            expected = await by_hand(one, hw.Multinomial(seed=i), max_tokens=50, stop_only=True)
            assert await run_ahead(two, hw.Multinomial(seed=i), max_tokens=50, stop_only=True) == expected

    tasks = [asyncio.ensure_future(wild(i)) for i in range(12)]
    calm_ones = [asyncio.ensure_future(calm(i)) for i in range(4)]
    for task in tasks[::2]:
        await asyncio.sleep(dice.random() * 0.02)
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.gather(*calm_ones)
