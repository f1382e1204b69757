"""Pages that go to pinned host memory and come back, on streams of their own, while steps go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.kv.allocator import Load, Save
from headway.kv.tensor_pool import TensorPool
from headway.kv.tiers.page_store import PageName, PageStore
from headway.runtime.scheduler import cache_tiers
from headway.testing import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def copies_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_tiers, "COLD", 1 << 30)


def cuda_pool(pages: int, numbers: int) -> TensorPool:
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    return TensorPool(layers=4, pages=pages, page_size=16, kv_heads=2, head_dim=numbers, by_head=True, **where)


def test_what_overlaps_with_work_on_the_device_arrives_whole() -> None:
    """Pages are overwritten right after their copy is queued, while the device is busy, again and again."""
    pool = cuda_pool(96, 256)
    store = PageStore(pool.new_places(64), 64)
    a = torch.randn(4096, 4096, device="cuda")
    whole = pool.raw.clone()
    for n in range(64):
        whole[:, :, n + 1] = torch.randn_like(whole[:, :, n + 1])
    for turn in range(6):
        pool.raw[:, :, 1:65] = whole[:, :, 1:65]
        names = [PageName(bytes([turn, n]), 0) for n in range(64)]
        order = np.random.default_rng(turn).permutation(64).tolist()
        for first in range(0, 64, 8):
            part = order[first : first + 8]
            a = torch.tanh(a @ a)
            pool.apply([Save(tuple(n + 1 for n in part), store, tuple(part), tuple(names[n] for n in part))])
            for n in part:
                pool.raw[:, :, n + 1] = float("nan")
        for first in range(0, 64, 8):
            part = order[first : first + 8]
            pool.apply([Load(store, tuple(part), tuple(names[n] for n in part), tuple(n + 1 for n in part))])
        assert torch.equal(pool.raw[:, :, 1:65], whole[:, :, 1:65])
    assert store.errors == 0
    assert store.memory.page_seconds is not None


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("folder", [False, True])
def test_a_load_larger_than_the_pool_gives_the_same_and_computes_less(
    options: dict[str, Any], folder: bool, tmp_path: Path
) -> None:
    model = random_model(device="cuda", dtype="float32", layers=3)
    prompts = [np.random.default_rng(user).integers(0, 97, 400).tolist() for user in range(12)]

    async def program(engine: hw.Engine) -> list[np.ndarray]:
        async def ask(prompt: list[int]) -> np.ndarray:
            async with engine.context() as context:
                forward = context.forward().input(prompt)
                handle = forward.probe(-1, hw.Logits())
                found = (await forward.execute()).logits(handle)
                await context.fill([1]).generate(hw.Argmax(), max_tokens=20).tokens()
                return found

        found: list[np.ndarray] = []
        for turn in range(3):
            for first in range(0, 12, 4):
                asked = (ask(prompt[: 200 + 90 * turn]) for prompt in prompts[first : first + 4])
                found += await asyncio.gather(*asked)
        return found

    with hw.Engine(model, device="cuda", pages=120, **options) as engine:
        expected, before = engine.run(program), engine.stats()
    tiers: dict[str, Any] = {"cache_host": "64M"}
    if folder:
        tiers = {"cache_host": 60 * engine.info.kv_bytes_per_token * 16, "cache_folder": tmp_path / "pages"}
    with hw.Engine(model, device="cuda", pages=120, **tiers, **options) as engine:
        found, after = engine.run(program), engine.stats()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0 if options else 2e-3, rtol=0)
    assert after.cache_host_hits + after.cache_folder_hits > 50
    assert after.tokens < 0.9 * before.tokens
    assert after.cache_tier_errors == 0


def test_sleep_leaves_cached_pages_in_host_memory() -> None:
    with hw.Engine(random_model(device="cuda"), device="cuda", pages=32, cache_host="16M") as engine:

        async def ask(engine: hw.Engine) -> int:
            async with engine.context() as context:
                forward = context.forward().input(list(range(90)))
                handle = forward.sample([-1], hw.Argmax())
                token = (await forward.execute()).token(handle)
                assert token is not None
                return token

        expected = engine.run(ask)
        engine.sleep()
        engine.wake()
        before = engine.stats().tokens
        assert engine.run(ask) == expected
        assert engine.stats().tokens - before == 90 - 5 * 16
