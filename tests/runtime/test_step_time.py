"""Prompts join the steps of decoding sequences with as many tokens as the time of a step allows."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from types import SimpleNamespace

import pytest

import headway as hw
from headway.base.errors import InvalidInput
from headway.runtime import loop
from headway.runtime.batch import Batch
from headway.runtime.scheduler.step_time import FIRST, LEAST, QUICK, SLOWDOWN, StepTime
from headway.testing import random_model
from support.watched import PatientRunner


def run_steps(
    pace: StepTime, *, decode: float, token: float, prompt: int, budget: int = 512
) -> list[tuple[int, float]]:
    """Steps of a made-up machine until a prompt is computed: tokens of it, and seconds."""
    budget = 512
    for _ in range(5):
        pace.note(8, 0, decode)
    pace.note(0, budget, budget * token)
    steps: list[tuple[int, float]] = []
    while prompt:
        tokens = min(prompt, pace.prefill_tokens, budget)
        # A token of a later chunk attends to more slots.
        seconds = decode + tokens * token * (1 + 0.2 * len(steps) / 50)
        pace.note(8, tokens, seconds)
        steps.append((tokens, seconds))
        prompt -= tokens
    return steps


@pytest.mark.parametrize(("decode", "token"), [(0.009, 0.0007), (0.05, 0.0007), (0.003, 0.0001), (0.1, 0.004)])
def test_a_step_with_a_prompt_takes_at_most_three_times_one_without(decode: float, token: float) -> None:
    steps = run_steps(StepTime(), decode=decode, token=token, prompt=4000)
    assert max(seconds for _, seconds in steps) <= 1.1 * max(QUICK, SLOWDOWN * decode)
    busy = [tokens for tokens, _ in steps[:-1]]
    assert min(busy) >= LEAST
    assert median(seconds for _, seconds in steps) >= min(0.8 * SLOWDOWN * decode, decode + 512 * token)


def test_a_time_that_was_set_is_the_target() -> None:
    steps = run_steps(StepTime(0.05), decode=0.01, token=0.001, prompt=4000)
    assert 0.04 < median(seconds for _, seconds in steps) < 0.055


def test_prompts_go_on_where_the_time_is_too_short_for_them() -> None:
    steps = run_steps(StepTime(0.001), decode=0.01, token=0.001, prompt=400)
    assert {tokens for tokens, _ in steps} == {LEAST}


def test_little_is_given_before_anything_was_measured() -> None:
    pace = StepTime()
    assert pace.prefill_tokens == FIRST
    pace.note(0, 500, 0.4)
    assert pace.prefill_tokens == FIRST  # nobody has decoded yet
    pace.note(8, 100, 0.1)
    assert pace.prefill_tokens == pytest.approx(50, abs=1)  # what is not the prompt's is the decodes'
    pace.note(8, 0, 0.01)
    assert pace.prefill_tokens == pytest.approx(25, abs=1)


def test_one_slow_step_does_not_count_for_what_it_took() -> None:
    pace = StepTime()
    for _ in range(20):
        pace.note(8, 0, 0.01)
    pace.note(0, 512, 0.5)
    before = pace.prefill_tokens
    pace.note(8, 0, 5.0)
    after = pace.prefill_tokens
    assert after < 1.5 * before


def prompts_beside_decodes(engine: hw.Engine) -> tuple[list[int], list[int]]:
    """Rows of the steps while a long prompt joins four decoding sequences, and while another is computed alone."""
    rows: list[int] = []
    tokens: list[int] = []

    async def decode(start: int, ended: asyncio.Event) -> None:
        async with engine.context() as ctx:
            async for step in ctx.fill([start, 2, 3]).generate(hw.Argmax(), max_tokens=400, stop_only=True):
                tokens.append(len(step.tokens))
                if ended.is_set():
                    break

    async def program(engine: hw.Engine) -> None:
        ended = asyncio.Event()
        tasks = [asyncio.create_task(decode(i, ended)) for i in range(4)]
        while len(tokens) < 60:
            await asyncio.sleep(0.005)
        async with engine.context() as ctx:
            rows.clear()
            await ctx.fill([i % 60 for i in range(900)]).flush()
            mixed.extend(rows)
        ended.set()
        await asyncio.gather(*tasks)
        async with engine.context() as ctx:
            rows.clear()
            await ctx.fill([7 + i % 50 for i in range(900)]).flush()

    mixed: list[int] = []
    engine._loop.listeners.append(lambda event: rows.append(event.rows))
    engine.run(program)
    return mixed, rows


class TimedRunner(PatientRunner):
    """Each row takes a millisecond, on a clock of its own: whatever else the machine does."""

    seconds = 0.0

    def before(self, batch: Batch) -> None:
        super().before(batch)
        self.seconds += batch.rows / 1000


def test_an_engine_gives_prompts_smaller_steps_while_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    with hw.Engine(random_model(), pages=400, device="cpu", threads=1, step_ms=0.001) as engine:
        runner = TimedRunner(engine)
        clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: runner.seconds)
        monkeypatch.setattr(loop, "time", clock)
        mixed, alone = prompts_beside_decodes(engine)
    assert median(mixed) <= LEAST + 4
    assert max(alone) == 512


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match="step_ms"):
        hw.Engine(random_model(), pages=8, step_ms=value)
