"""Bias and penalties in run-ahead decoding: every token is the one that a pass by hand would have sampled, on each kind
of runner."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.runtime.runners.cuda import model as cuda_step  # noqa: E402
from headway.testing import random_model  # noqa: E402
from support.checks import random_tokens  # noqa: E402
from support.run_ahead import watched  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

V = 97
BIAS = {3: 2.5, 40: -4.0, 60: 1.5}
ROWS: list[dict[str, Any]] = [
    {"sampler": hw.Sampling(temperature=0, repetition_penalty=1.6)},
    {"sampler": hw.Sampling(temperature=0.9, presence_penalty=-2.0, frequency_penalty=-2.0, seed=1)},  # says it again
    {"sampler": hw.Sampling(temperature=0, frequency_penalty=-2.0, presence_penalty=-1.0), "penalize_prompt": False},
    {"sampler": hw.Sampling(temperature=0.7, repetition_penalty=0.5, seed=5), "penalize_prompt": False},
    {"sampler": hw.Sampling(temperature=0.8, top_k=30, repetition_penalty=1.3, logit_bias=BIAS, seed=2)},
    {"sampler": hw.Sampling(temperature=0, logit_bias=BIAS)},
    {"sampler": hw.Argmax()},
    {"sampler": hw.Sampling(temperature=0, repetition_penalty=1.4), "min_tokens": 5},
]


@pytest.fixture(params=[pytest.param("triton", marks=pytest.mark.slow), "off", "auto"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Engine]:
    monkeypatch.setenv("HEADWAY_NATIVE", request.param)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_step, "PROGRAMS", 8)
    sizes: dict[str, Any] = {"layers": 1, "hidden_size": 32, "intermediate_size": 32, "heads": 2, "kv_heads": 1}
    with hw.Engine(random_model(device=DEVICE, **sizes), pages=64, threads=1) as made:
        yield made


async def by_hand(engine: hw.Engine, row: int, count: int, **options: Any) -> list[int]:
    """The tokens of a row, each step prepared and taken by hand: a pass that nothing is ahead of."""
    async with engine.context().fill(random_tokens(V, 18, row)) as context:
        generation = context.generate(max_tokens=count, **ROWS[row], **options)
        found: list[int] = []
        while generation.finish is None:
            found += (await (await generation.prepare()).take()).tokens
        return found


async def ahead(engine: hw.Engine, row: int, count: int, **options: Any) -> list[int]:
    async with engine.context().fill(random_tokens(V, 18, row)) as context:
        return await context.generate(max_tokens=count, **ROWS[row], **options).tokens()


def test_every_token_is_that_of_a_pass_by_hand(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        found = await asyncio.gather(*(ahead(engine, row, 9) for row in range(len(ROWS))))
        for row, tokens in enumerate(found):
            assert tokens == await by_hand(engine, row, 9), ROWS[row]
        assert len(set(found[1])) < len(found[1])  # what was generated counts

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_cuts_forks_and_resumed_generations_count_what_is_there(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        for row in (0, 1, 4):
            expected = await by_hand(engine, row, 10)
            async with engine.context().fill(random_tokens(V, 18, row)) as context:
                generation = context.generate(max_tokens=10, **ROWS[row])
                for cut in (0, 2, 1, 3):
                    for _ in range(4):
                        if generation.finish is None:
                            at = len(generation.generated)
                            assert (await anext(generation)).tokens == (expected[at],)
                    context.truncate(cut)
                    generation.resume()
                twin = generation.fork()
                assert await twin.tokens() == await generation.tokens() == expected
                twin.context.release()

    engine.run(program)


def test_a_mask_and_penalties_bind_a_row_together(engine: hw.Engine) -> None:
    class Every:
        """Allows every third token, and another third after each."""

        def __init__(self) -> None:
            self.at = 0

        def mask(self) -> Any:
            return [token % 3 == self.at % 3 for token in range(V)]

        def accept(self, token: int) -> None:
            self.at += 1

        def rollback(self, count: int) -> None:
            self.at -= count

    async def program(engine: hw.Engine) -> None:
        for row in (1, 4, 5):
            expected = await by_hand(engine, row, 8, constrain=Every())
            assert [token % 3 for token in expected] == [at % 3 for at in range(8)]
            assert await ahead(engine, row, 8, constrain=Every()) == expected

    engine.run(program)


def test_rows_with_penalties_are_decode_rows(engine: hw.Engine) -> None:
    with watched(engine) as steps:
        engine.run(ahead, 0, 8)
    native = "native" in engine.info.runner  # whose step draws without a history
    assert sum(steps.rows) == 0 if native else sum(steps.rows) >= 5
