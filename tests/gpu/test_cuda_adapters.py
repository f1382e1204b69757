"""Adapters on a CUDA device: captured graphs, every dtype, quantized weights, run-ahead decoding, slots that return."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.models.capabilities import Capabilities
from headway.models.decoder import Decoder
from headway.models.description import Description, Experts
from headway.models.quantized.cuda import quantize_decoder
from headway.testing import random_adapter, random_model
from support.checks import random_tokens
from support.merged import merged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
V = 97
Uses = list[tuple[hw.Adapter, float]]


def opened(decoder: Decoder, **options: Any) -> hw.Engine:
    return hw.Engine(decoder, device="cuda", pages=2000, **options)


def mixes_of(decoder: Decoder) -> list[Uses]:
    config = decoder.config
    one, two, three = (random_adapter(config, rank=rank, seed=rank) for rank in (3, 16, 70))
    few = random_adapter(config, rank=8, seed=9, roles=("q", "v"))
    return [[], [(one, 1.0)], [(two, 0.5)], [(three, -0.5), (one, 0.25)], [(few, 2.0), (two, 0.3), (one, 0.1)]]


async def generated(engine: hw.Engine, mixes: list[Uses], count: int, tokens: int = 12) -> list[list[int]]:
    async def one(i: int) -> list[int]:
        async with engine.context() as context:
            context.fill(random_tokens(V, 3 + i % 30, i))
            generation = context.generate(hw.Argmax(), max_tokens=tokens, stop_only=True, adapter=mixes[i % len(mixes)])
            return await generation.tokens()

    return list(await asyncio.gather(*(one(i) for i in range(count))))


async def scored(engine: hw.Engine, tokens: list[int], uses: Uses) -> np.ndarray:
    async with engine.context() as context:
        forward = context.forward().input(tokens)
        for adapter, scale in uses:
            forward.adapter(adapter, scale)
        handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
        out = await forward.execute()
        return np.stack([out.logits(handle) for handle in handles])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_float32_logits_are_those_of_the_merged_model(family: str) -> None:
    decoder = random_model(family)
    on_device = random_model(family, device="cuda")
    with opened(on_device) as engine:
        assert engine.info.runner == "triton"
        for uses in mixes_of(decoder):
            for count in (1, 2, 9, 40):
                tokens = random_tokens(V, count, count)
                found = engine.run(scored, tokens, uses)
                with hw.Engine(merged(decoder, *uses), device="cpu", threads=2, pages=64) as dense:
                    expected = dense.run(scored, tokens, [])
                assert np.abs(found - expected).max() <= 2e-4 * max(1.0, np.abs(expected).max())
            engine.cache.clear()


@pytest.mark.parametrize("count", [1, 2, 5, 33, 64, 100])
def test_graphs_give_what_the_kernels_give_by_hand(count: int) -> None:
    """Twice each: the first run of a size is launched, the second captured; float32, so that tokens are the same."""
    decoder = random_model(device="cuda")
    mixes = mixes_of(decoder)[::-1]  # the first has adapters
    with opened(decoder) as graphs, opened(decoder) as hand:
        hand._loop._runner._graphs.enabled = False  # type: ignore[attr-defined]
        for _ in range(3):
            assert graphs.run(generated, mixes, count) == hand.run(generated, mixes, count)
        keys = graphs._loop._runner._graphs.graphs  # type: ignore[attr-defined]
        assert any(len(key) > 2 and key[0] == "step" for key in keys)


def test_a_sequence_is_the_same_alone_and_in_a_crowd_of_adapters() -> None:
    decoder = random_model(device="cuda")
    mixes = mixes_of(decoder)
    with opened(decoder) as engine:
        crowd = engine.run(generated, mixes, 40)
        for i in range(0, 40, 7):

            async def alone(engine: hw.Engine, i: int = i) -> list[int]:
                async with engine.context() as context:
                    context.fill(random_tokens(V, 3 + i % 30, i))
                    return await context.generate(
                        hw.Argmax(), max_tokens=12, stop_only=True, adapter=mixes[i % 5]
                    ).tokens()

            assert engine.run(alone) == crowd[i]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [None, "int8", "int4", "fp8"])
def test_smaller_types_stay_near_the_merged_model(dtype: str, kind: Any) -> None:
    decoder = random_model("llama", device="cuda", dtype=dtype, hidden_size=256, intermediate_size=512)
    small = decoder if kind is None else quantize_decoder(decoder, kind)
    wide = random_model("llama", hidden_size=256, intermediate_size=512)
    with opened(small) as engine:
        for uses in mixes_of(decoder)[1:]:
            for count in (1, 12, 90):
                tokens = random_tokens(V, count, count)
                found, plain = engine.run(scored, tokens, uses), engine.run(scored, tokens, [])
                with hw.Engine(merged(wide, *uses), device="cpu", threads=2, pages=64) as dense:
                    expected = dense.run(scored, tokens, [])
                with hw.Engine(wide, device="cpu", threads=2, pages=64) as dense:
                    base = dense.run(scored, tokens, [])
                error, own = np.abs(found - expected).mean(), np.abs(plain - base).mean()
                assert error <= 4 * own + 0.02 * np.abs(expected).mean()
                assert np.abs(expected - base).mean() > 1.5 * own  # the adapters show
            engine.cache.clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_rows_have_the_same_bits_in_any_step(dtype: str) -> None:
    decoder = random_model("qwen3", device="cuda", dtype=dtype)
    mixes = mixes_of(decoder)
    tokens = random_tokens(V, 30, 3)

    async def together(engine: hw.Engine) -> list[np.ndarray]:
        return list(await asyncio.gather(*(scored(engine, tokens[: 5 + 4 * i], mix) for i, mix in enumerate(mixes))))

    with opened(decoder, deterministic=True) as engine:
        alone = [engine.run(scored, tokens[: 5 + 4 * i], mix) for i, mix in enumerate(mixes)]
        engine.cache.clear()
        for found, expected in zip(engine.run(together), alone, strict=True):
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_of_experts_are_those_of_torch_in_graphs_too(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decode rows under different adapters of experts, shared ones and routers, beside rows without."""
    what = Description(experts=Experts(count=8, per_token=2, size=64, shared_size=48))
    decoder = random_model(description=what, device="cuda", dtype=dtype)
    roles, config = Capabilities.of(decoder.config).adapters, decoder.config
    one, two = random_adapter(config, rank=3, seed=1, roles=roles), random_adapter(config, rank=40, seed=2, roles=roles)
    three = random_adapter(config, rank=16, seed=3, roles=("expert_up", "expert_down"))
    mixes: list[Uses] = [[(one, 1.0)], [], [(two, 0.5), (three, -0.5)], [(three, 1.0)], [(two, 0.25), (one, 0.25)]]
    with opened(decoder) as engine:
        assert engine.info.runner == "triton"
        logits = [engine.run(scored, random_tokens(V, count, count), mixes[2]) for count in (1, 9, 70)]
        tokens = [engine.run(generated, mixes, 12) for _ in range(3)]
        keys = engine._loop._runner._graphs.graphs  # type: ignore[attr-defined]
        assert any(len(key) > 2 and key[0] == "step" for key in keys)
        assert tokens[1] == tokens[2]
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with opened(decoder) as engine:
        assert engine.info.runner == "torch"
        for found, count in zip(logits, (1, 9, 70), strict=True):
            expected = engine.run(scored, random_tokens(V, count, count), mixes[2])
            tolerance = 2e-4 if dtype == "float32" else 6e-2
            assert np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max())
        if dtype == "float32":
            assert engine.run(generated, mixes, 12) == tokens[0]


def test_slots_come_back_and_memory_is_counted() -> None:
    decoder = random_model(device="cuda")
    with opened(decoder) as engine:
        free = len(engine._loop._runner.model.adapters._free)  # type: ignore[attr-defined]
        for seed in range(20):
            adapter = random_adapter(decoder.config, rank=4, seed=seed)
            engine.run(scored, [1, 2, 3], [(adapter, 1.0)])
            assert engine.stats().adapter_bytes > 0
            del adapter
            engine.run(scored, [1, 2, 3], [])
            engine.cache.clear()
        gc.collect()
        assert engine.stats().adapters == 0
        assert len(engine._loop._runner.model.adapters._free) == free  # type: ignore[attr-defined]
