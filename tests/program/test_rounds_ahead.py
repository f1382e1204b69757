"""Rounds that the worker submits ahead of the program: the same tokens, whatever the program does between two steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.testing import random_model
from support.checks import random_tokens

V = 97
PROMPT = random_tokens(V, 40, 3)
SEEDED = hw.Sampling(temperature=0.7, top_k=20, seed=4)
Between = Callable[[hw.Context, hw.Generation, np.random.Generator], Awaitable[None]]


class Recorded:
    """Says recorded tokens again, some of them wrong, and notes which threads ask it and all that it was told."""

    adaptive = False

    def __init__(self, known: Sequence[int], wrong: float = 0.2, seed: int = 0, raises_at: int | None = None) -> None:
        self.known, self.wrong, self.raises_at = list(known), wrong, raises_at
        self.random = np.random.default_rng(seed)
        self.threads: list[str] = []
        self.told: list[int] = []

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        self.threads.append(threading.current_thread().name)
        assert list(tokens) == self.told
        if self.raises_at is not None and len(self.threads) == self.raises_at:
            raise ValueError("no idea")
        ahead = self.known[len(tokens) : len(tokens) + min(limit, 6)]
        return [(t + 1) % V if self.random.random() < self.wrong else t for t in ahead]

    def accept(self, tokens: Sequence[int]) -> None:
        self.told += tokens

    @property
    def asked_ahead(self) -> int:
        return self.threads.count("headway-worker")


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(), pages=256, threads=1, deterministic=True) as made:
        yield made


async def expected(engine: hw.Engine, count: int, **options: Any) -> list[int]:
    async with engine.context().fill(PROMPT) as context:
        return await context.generate(SEEDED, max_tokens=count, **options).tokens()


def test_the_worker_asks_the_drafter_while_the_program_takes_tokens(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        known = await expected(engine, 80)
        drafter = Recorded([*PROMPT, *known])
        async with engine.context().fill(PROMPT) as context:
            generation = context.generate(SEEDED, max_tokens=80, speculate=drafter)
            steps = [step async for step in generation]
            assert [token for step in steps for token in step.tokens] == known
            assert list(context.tokens) == [*PROMPT, *known]
            stats = generation.speculation
            assert stats is not None
            assert sum(step.drafted for step in steps) == stats.drafted
            assert sum(step.accepted for step in steps) == stats.accepted
            assert drafter.asked_ahead > 0  # at least after the first round, which the program awaits
            raw = context.inner()
            assert raw.committed_page_count == context.seq_len // 16
            assert raw.committed_page_count + raw.working_page_count == -(-context.seq_len // 16)

    engine.run(program)


@pytest.mark.parametrize(
    "options",
    [{"probe": hw.Entropy()}, {"no_repeat_ngram_size": 3}],
    ids=str,
)
def test_the_program_is_waited_for_where_it_decides(engine: hw.Engine, options: dict[str, Any]) -> None:
    async def program(engine: hw.Engine) -> None:
        known = await expected(engine, 40, **options)
        drafter = Recorded([*PROMPT, *known])
        async with engine.context().fill(PROMPT) as context:
            assert await context.generate(SEEDED, max_tokens=40, speculate=drafter, **options).tokens() == known
        assert drafter.asked_ahead == 0
        assert len(drafter.threads) > 4

    engine.run(program)


async def looks(context: hw.Context, generation: hw.Generation, random: np.random.Generator) -> None:
    if random.random() < 0.4:
        assert context.seq_len == len(context.tokens) - len(context.pending)
        assert tuple(context.tokens) == (*PROMPT, *generation.generated)


async def cuts(context: hw.Context, generation: hw.Generation, random: np.random.Generator) -> None:
    if random.random() < 0.4 and len(generation.generated) > 6:
        context.truncate(int(random.integers(1, 6)))


async def forks(context: hw.Context, generation: hw.Generation, random: np.random.Generator) -> None:
    if random.random() < 0.2:
        twin = generation.fork(seed=SEEDED.seed)
        with twin.context:
            count = min(30, len(generation.generated) + 5)
            while len(twin.generated) < count and twin.finish is None:
                await anext(twin, None)
            assert tuple(twin.context.tokens) == (*PROMPT, *twin.generated)


async def waits(context: hw.Context, generation: hw.Generation, random: np.random.Generator) -> None:
    await asyncio.sleep(float(random.choice([0, 0.002])))


async def cancels(context: hw.Context, generation: hw.Generation, random: np.random.Generator) -> None:
    before = list(generation.generated) if random.random() < 0.5 else None
    task = asyncio.ensure_future(anext(generation, None))
    await asyncio.sleep(float(random.choice([0, 0.0005, 0.002])))
    task.cancel()
    step = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(step, asyncio.CancelledError) and before is not None:
        assert list(generation.generated) == before
        assert list(context.tokens) == [*PROMPT, *before]


@pytest.mark.parametrize("between", [looks, cuts, forks, waits, cancels], ids=lambda f: f.__name__)
def test_whatever_a_program_does_between_steps_the_tokens_are_the_same(engine: hw.Engine, between: Between) -> None:
    async def program(engine: hw.Engine) -> None:
        known = await expected(engine, 60)
        for seed in range(6):
            random, drafter = np.random.default_rng(seed), _Fresh([*PROMPT, *known], seed)
            async with engine.context().fill(PROMPT) as context:
                generation = context.generate(SEEDED, max_tokens=60, speculate=drafter)
                for _ in range(12):
                    if await anext(generation, None) is None:
                        break
                    await between(context, generation, random)
                assert await generation.tokens() == known, seed
                assert list(context.tokens) == [*PROMPT, *known]
            assert engine.stats().pages_held == 0

    engine.run(program)


class _Fresh(Recorded):
    """One that can be copied, and is told of cuts by a new copy."""

    def copy(self) -> _Fresh:
        return _Fresh(self.known, self.wrong, int(self.random.integers(1 << 31)))


def test_a_round_that_was_left_ahead_goes_with_its_context(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        known = await expected(engine, 60)
        for count in (1, 2, 5):
            async with engine.context().fill(PROMPT) as context:
                generation = context.generate(SEEDED, max_tokens=60, speculate=Recorded([*PROMPT, *known]))
                for _ in range(count):
                    await anext(generation)
        await asyncio.sleep(0.05)
        assert engine.stats().pages_held == 0

    engine.run(program)


def test_resume_with_fewer_tokens_takes_the_round_ahead_back(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        known = await expected(engine, 60)
        async with engine.context().fill(PROMPT) as context:
            generation = context.generate(SEEDED, max_tokens=60, speculate=Recorded([*PROMPT, *known]))
            for _ in range(3):
                await anext(generation)
            count = len(generation.generated) + 2
            assert await generation.resume(2).tokens() == known[:count]
            assert generation.finish == "length"

    engine.run(program)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_what_the_drafter_raises_ahead_the_next_step_raises(engine: hw.Engine, at: int) -> None:
    async def program(engine: hw.Engine) -> None:
        known = await expected(engine, 60)
        async with engine.context().fill(PROMPT) as context:
            drafter = Recorded([*PROMPT, *known], raises_at=at)
            generation = context.generate(SEEDED, max_tokens=60, speculate=drafter)
            with pytest.raises(hw.InvalidInput, match="Recorded raised ValueError: no idea"):
                await generation.tokens()
            assert await generation.tokens() == known

    engine.run(program)


def test_two_tasks_cannot_take_steps_at_once(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        known = await expected(engine, 60)
        async with engine.context().fill(PROMPT) as context:
            generation = context.generate(SEEDED, max_tokens=60, speculate=_Fresh([*PROMPT, *known]))
            for _ in range(8):
                found = await asyncio.gather(anext(generation), anext(generation), return_exceptions=True)
                assert any(isinstance(one, hw.Step) for one in found), found
                assert all(isinstance(one, hw.Step | hw.ContextBusy) for one in found), found
            assert await generation.tokens() == known

    engine.run(program)
