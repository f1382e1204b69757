"""Probes in run-ahead decoding: every step has what a pass by hand would have read, on each kind of runner."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.runtime.runners.cuda import model as cuda_step  # noqa: E402
from headway.runtime.runners.cuda import probe_rounds  # noqa: E402
from headway.testing import random_model  # noqa: E402
from support.checks import random_tokens  # noqa: E402
from support.run_ahead import watched  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

V = 97
RANKS = hw.Ranking(3, ids=[7])
SEEDED = hw.Sampling(temperature=0.8, top_k=12, seed=3)
ROWS: list[tuple[hw.Sampler, Any]] = [
    (hw.Argmax(), hw.Distribution(temperature=0.7, k=5)),
    (SEEDED, [hw.Entropy(), RANKS]),
    (SEEDED, None),
    (hw.Argmax(), [hw.Logits(), hw.Logprob(11), hw.Logprobs([3, 90]), hw.Ranking(2, processed=True)]),
    (SEEDED, [hw.Ranking(2, processed=True)]),  # after filters: no runner's decode rows know these
    (SEEDED, []),
    (hw.Sampling(temperature=0, presence_penalty=-2.0), [hw.Entropy(), RANKS]),  # probes see no penalties
    (hw.Sampling(temperature=0.9, logit_bias={5: 4.0, 70: -3.0}, seed=7), [hw.Ranking(3, processed=True), hw.Logits()]),
]


@pytest.fixture(params=[pytest.param("triton", marks=pytest.mark.slow), "off", "auto"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Engine]:
    monkeypatch.setenv("HEADWAY_NATIVE", request.param)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_step, "PROGRAMS", 8)
    sizes: dict[str, Any] = {"layers": 1, "hidden_size": 32, "intermediate_size": 32, "heads": 2, "kv_heads": 1}
    with hw.Engine(random_model(device=DEVICE, **sizes), pages=64, threads=1) as made:
        yield made


def flat(value: Any) -> list[float]:
    """Every number in a probe's value."""
    if isinstance(value, hw.Ranked):
        return [n for rank in (*value.drawn, *value.ids, *value.best) for n in (rank.id, rank.logprob, rank.rank)]
    if isinstance(value, list | tuple):
        return [number for one in value for number in flat(one)]
    return np.ravel(value).tolist()


async def by_hand(engine: hw.Engine, row: int, count: int, **options: Any) -> list[Any]:
    """Tokens and probes of a row, each step prepared and taken by hand: a pass that nothing is ahead of."""
    sampler, probe = ROWS[row]
    async with engine.context().fill(random_tokens(V, 18, row)) as context:
        generation = context.generate(sampler, max_tokens=count, probe=probe, **options)
        found = []
        while generation.finish is None:
            step = await (await generation.prepare()).take()
            found.append((step.tokens, step.finish, flat(step.probes)))
        return found


async def ahead(engine: hw.Engine, row: int, count: int, **options: Any) -> list[Any]:
    sampler, probe = ROWS[row]
    async with engine.context().fill(random_tokens(V, 18, row)) as context:
        generation = context.generate(sampler, max_tokens=count, probe=probe, **options)
        return [(step.tokens, step.finish, flat(step.probes)) async for step in generation]


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert [step[:2] for step in found] == [step[:2] for step in expected]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-4, atol=1e-5)


def test_every_step_has_what_a_pass_by_hand_reads(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        found = await asyncio.gather(*(ahead(engine, row, 7) for row in range(len(ROWS))))
        for row, steps in enumerate(found):
            assert_alike(steps, await by_hand(engine, row, 7))

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_an_end_token_has_its_probes_too(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        for row in (0, 1):
            tokens = [token for step in await by_hand(engine, row, 6) for token in step[0]]
            end = next(token for token in tokens[2:] if token not in tokens[:2])
            expected = await by_hand(engine, row, 6, stop=[end])
            assert expected[-1][1] == "stop"
            assert len(expected[-1][2]) > 0
            assert_alike(await ahead(engine, row, 6, stop=[end]), expected)

    engine.run(program)


def test_cuts_between_steps_keep_probes_and_tokens_together(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        expected = await by_hand(engine, 1, 8)
        sampler, probe = ROWS[1]
        async with engine.context().fill(random_tokens(V, 18, 1)) as context:
            generation = context.generate(sampler, max_tokens=8, probe=probe)
            for cut in (0, 2, 1, 3):
                for _ in range(4):
                    if generation.finish is None:
                        at = len(generation.generated)
                        step = await anext(generation)
                        assert_alike(
                            [(step.tokens, None, flat(step.probes))], [(*expected[at][:1], None, expected[at][2])]
                        )
                context.truncate(cut)
                generation.resume()

    engine.run(program)


def test_rows_with_probes_are_decode_rows(engine: hw.Engine) -> None:
    native = "native" in engine.info.runner  # whose step samples decode rows itself
    for row in (1, 6):
        with watched(engine) as steps:
            engine.run(ahead, row, 8)
        assert sum(steps.rows) == 0 if native else sum(steps.rows) >= 5


def test_more_probes_than_are_asked_at_once_are_read_before_the_next_step(
    engine: hw.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_rounds, "JOBS", 2)

    async def program(engine: hw.Engine) -> None:
        found = await asyncio.gather(*(ahead(engine, row, 5) for row in (0, 1, 3)))
        for row, steps in zip((0, 1, 3), found, strict=True):
            assert_alike(steps, await by_hand(engine, row, 5))

    engine.run(program)
