"""Engines on a CUDA device, as they come there: every family, the oracle's state machine, the law of batch mates.

Needs a GPU and random models only. Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import headway as hw
from headway.testing import random_model

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))


async def logits_of(engine: hw.Engine, tokens: list[int], chunks: list[int]) -> np.ndarray:
    async with engine.context() as context:
        rows = []
        for start, stop in zip([0, *chunks], [*chunks, len(tokens)], strict=True):
            forward = context.forward().input(tokens[start:stop])
            handles = [forward.probe(i, hw.Logits()) for i in range(stop - start)]
            out = await forward.execute()
            rows += [out.logits(h) for h in handles]
        return np.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_gives_the_logits_of_the_cpu(family: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 97, 50).tolist()
    with (
        hw.Engine(random_model(family, device="cpu"), device="cpu", pages=32) as cpu,
        hw.Engine(random_model(family, device="cuda"), device="cuda", pages=32) as cuda,
    ):
        expected = cpu.run(logits_of, tokens, [])
        for chunks in ([], [1], [16, 33], list(range(1, 50))):
            found = cuda.run(logits_of, tokens, chunks)
            assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_rows_do_not_depend_on_their_number(family: str) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 97, n).tolist() for n in (1, 3, 15, 16, 17, 33, 64)]

    async def together(engine: hw.Engine) -> list[np.ndarray]:
        return list(await asyncio.gather(*(logits_of(engine, p, []) for p in prompts)))

    with hw.Engine(random_model(family, device="cuda"), device="cuda", pages=64, deterministic=True) as engine:
        for alone, among in zip([engine.run(logits_of, p, []) for p in prompts], engine.run(together), strict=True):
            engine.cache.clear()
            assert np.array_equal(alone, among)
        for tokens in prompts:
            pieces = list(range(1, len(tokens), 5))
            assert np.array_equal(engine.run(logits_of, tokens, pieces), engine.run(logits_of, tokens, []))


def test_sampling_on_the_device_fits_the_distribution() -> None:
    with hw.Engine(random_model(device="cuda"), device="cuda", pages=32) as engine:
        context = engine.context()
        context.fill([1, 2, 3])
        forward = context.forward()
        looked = forward.probe(-1, hw.Distribution(k=0))
        draws = forward.sample([-1] * 4000, hw.Multinomial(seed=5))
        out = forward.execute().result()
        ids, probabilities = out.distribution(looked)
        counts = np.bincount(out.tokens(draws), minlength=97)[ids]
        kept = probabilities * 4000 >= 5
        chi = ((counts[kept] - 4000 * probabilities[kept]) ** 2 / (4000 * probabilities[kept])).sum()
        assert chi < kept.sum() + 6 * np.sqrt(2 * kept.sum())


@pytest.mark.parametrize("number", range(4))
def test_every_interleaving_equals_the_oracle_on_cuda(number: int) -> None:
    from test_oracle_machine import CASES, drive

    drive(CASES[number], examples=25, steps=20, device="cuda", dtype="float32")
