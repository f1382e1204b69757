"""Run-ahead decoding gives what steps by hand give, in decode rows, beside chunks of passes, and as passes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.kv.allocator import Edit
from headway.runtime.scheduler.step_plan import StepPlan
from headway.testing import random_model
from support.run_ahead import abandoned, alike, ends, steered, watched
from support.sweeps import swept

PATHS = ("native", "torch")


def opened(path: str, monkeypatch: pytest.MonkeyPatch, family: str = "llama", pages: int = 400) -> hw.Engine:
    monkeypatch.setenv("HEADWAY_NATIVE", "require" if path == "native" else "off")
    return hw.Engine(random_model(family), device="cpu", pages=pages)


@pytest.fixture(params=PATHS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Engine]:
    with opened(request.param, monkeypatch) as made:
        yield made
        gc.collect()
        assert made.stats().pages_held == 0


def test_many_generations_are_what_each_is_alone(engine: hw.Engine) -> None:
    engine.run(alike)


MASKS = [hw.Mask.window(7), hw.Mask.sink(2, 6), hw.Mask.causal(), ~hw.Mask.window(3) | hw.Mask.window(1)]


@pytest.mark.parametrize("mask", MASKS)
def test_masks_bind_every_token(engine: hw.Engine, mask: hw.Mask) -> None:
    async def program(engine: hw.Engine) -> None:
        await alike(engine, 6, attention_mask=mask)

    engine.run(program)


def test_an_end_token_ends_it(engine: hw.Engine) -> None:
    engine.run(ends)


@pytest.mark.parametrize("seed", range(4))
def test_contexts_can_be_changed_between_steps(engine: hw.Engine, seed: int) -> None:
    engine.run(steered, seed)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_those_that_end_early(engine: hw.Engine, seed: int) -> None:
    engine.run(abandoned, seed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pages", swept([14, 10, 20]))
def test_where_pages_are_short_contexts_are_preempted(path: str, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, monkeypatch, pages=pages) as engine:
        engine.run(alike)
        assert engine.stats().preemptions > 0
        engine.run(abandoned, 1)
        gc.collect()
        assert engine.stats().pages_held == 0


@pytest.mark.parametrize("pages", [14, 400])
def test_pages_that_cannot_be_cleared_before_a_step_change_nothing(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows take an ordinary step then, which waits for pages, or has others preempted."""
    with opened("native", monkeypatch, pages=pages) as engine, watched(engine) as steps:
        failed: list[Edit] = []

        def fail(edits: tuple[Edit, ...]) -> None:
            failed.extend(edits)
            raise RuntimeError("stuck")

        edit = engine._loop._runner.edit
        begin = engine._loop._begin

        def begin_failing(plan: StepPlan | None, *rest: Any) -> Any:
            only_decodes = plan is not None and not plan.chunks
            monkeypatch.setattr(engine._loop._runner, "edit", fail if only_decodes else edit)
            return begin(plan, *rest)

        monkeypatch.setattr(engine._loop, "_begin", begin_failing)
        engine.run(alike)
        assert failed
        assert steps.rows
        assert (engine.stats().preemptions > 0) == (pages == 14)
        gc.collect()
        assert engine.stats().pages_held == 0


@pytest.mark.parametrize("family", swept(["mistral", "llama", "qwen3"]))
def test_decode_rows_take_most_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("native", monkeypatch, family) as engine, watched(engine) as steps:
        engine.run(alike)
        assert sum(steps.rows) > 100
        assert max(steps.rows) > 4


def test_other_passes_join_the_steps_of_decoding_sequences(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill([1, 2, 3]) as one, engine.context() as other:
            generation = one.generate(hw.Argmax(), max_tokens=30, stop_only=True)
            async for _ in generation:
                await other.fill([4, 5]).flush()
            async with engine.context().fill([1, 2, 3]) as again:
                expected = await again.generate(hw.Argmax(), max_tokens=30, stop_only=True).tokens()
            assert list(generation.generated) == expected
            assert other.seq_len == 60

    engine.run(program)


def test_a_program_that_lags_is_waited_for(engine: hw.Engine) -> None:
    """A decoding sequence rests when it is far ahead, and its context can be looked at then."""

    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill([1, 2, 3]) as context:
            generation = context.generate(hw.Argmax(), max_tokens=100, stop_only=True)
            first = await anext(generation)
            while engine._loop.waiting():
                await asyncio.sleep(0.001)
            (job,) = engine._loop.jobs()
            assert job.resting
            ahead = len(job.decode.buffer)  # type: ignore[union-attr]
            assert 0 < ahead < 100
            assert list(context.tokens) == [1, 2, 3, *first.tokens]
            assert engine._loop.jobs() == []
            assert len(await generation.tokens()) == 100

    engine.run(program)


def test_grammars_bind_every_token(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real model, as decode rows: what is allowed after a token is computed while the device computes it."""
    text = hw.Grammar.regex("(?s)[a-z ,.]{30,400}")
    letter = hw.Grammar.json_schema(
        {
            "type": "object",
            "properties": {"body": {"type": "string", "minLength": 60}, "urgent": {"type": "boolean"}},
            "required": ["body", "urgent"],
            "additionalProperties": False,
        }
    )

    async def one(engine: hw.Engine, i: int, *, alone: bool) -> tuple[list[int], str | None, tuple[int, ...]]:
        async with engine.context().fill(f"Letter {i}: ") as context:
            sampler = hw.Multinomial(0.9, seed=i) if i % 3 else hw.Argmax()
            generation = context.generate(sampler, max_tokens=24, constrain=(text, letter)[i % 2])
            while alone and generation.finish is None:
                if forced := generation.forced():
                    generation.accept(forced)
                    continue
                try:
                    await (await generation.prepare()).take()
                except hw.Closed:
                    break
            return await generation.tokens(), generation.finish, context.tokens

    async def program(engine: hw.Engine) -> None:
        expected = [await one(engine, i, alone=True) for i in range(4)]
        assert list(await asyncio.gather(*(one(engine, i, alone=False) for i in range(4)))) == expected

    monkeypatch.setenv("HEADWAY_NATIVE", "require")
    with hw.Engine(smollm2_path, device="cpu", pages=400) as engine, watched(engine) as steps:
        engine.run(program)
        assert sum(steps.rows) > 20
        assert engine.stats().pages_held == 0
