"""Run-ahead decoding on a CUDA device, where a step is set going before the tokens of the last one are known."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headway as hw
from headway.testing import random_model
from support.run_ahead import abandoned, alike, ends, steered, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["llama", "mistral"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Engine]:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    with hw.Engine(random_model(request.param, device="cuda"), device="cuda", pages=400) as made:
        yield made
        gc.collect()
        assert made.stats().pages_held == 0


def test_many_generations_are_what_each_is_alone(engine: hw.Engine) -> None:
    with watched(engine) as steps:
        engine.run(alike)
    assert sum(steps.rows) > 100


def test_masks_bind_every_token(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        for mask in (hw.Mask.window(7), hw.Mask.sink(2, 6)):
            await alike(engine, 6, attention_mask=mask)

    engine.run(program)


def test_an_end_token_ends_it(engine: hw.Engine) -> None:
    engine.run(ends)


@pytest.mark.parametrize("seed", range(3))
def test_contexts_can_be_changed_between_steps(engine: hw.Engine, seed: int) -> None:
    engine.run(steered, seed)
    engine.run(abandoned, seed)


@pytest.mark.slow
def test_minutes_of_random_operations(engine: hw.Engine) -> None:
    for seed in range(1000, 1120):
        engine.run(steered, seed)
        engine.run(abandoned, seed)


def test_where_pages_are_short_contexts_are_preempted() -> None:
    with hw.Engine(random_model(device="cuda"), device="cuda", pages=14) as engine:
        engine.run(alike)
        assert engine.stats().preemptions > 0
