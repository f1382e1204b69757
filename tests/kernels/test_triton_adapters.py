"""Whole engines with adapters on the Triton kernels against the same on torch, over dense and quantized weights.

Without a GPU the kernels run in Triton's interpreter, on fewer passes.
"""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.models.decoder import Decoder  # noqa: E402
from headway.models.description import Description  # noqa: E402
from headway.models.quantized.cuda import quantize_decoder  # noqa: E402
from headway.models.quantized.reference import float_decoder  # noqa: E402
from headway.runtime.runners.cuda import model as cuda_model  # noqa: E402
from headway.testing import random_adapter, random_model  # noqa: E402
from support.descriptions import STREAMS  # noqa: E402
from support.eventually import eventually  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SIZES: dict[str, Any] = {"layers": 1, "hidden_size": 32, "intermediate_size": 32, "heads": 2, "kv_heads": 1}
SLOWER = () if DEVICE == "cuda" else pytest.mark.slow


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: there is no device to keep busy."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_model, "PROGRAMS", 8)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def adapters(engine: hw.Engine) -> list[hw.Adapter]:
    """One of every matrix, and one of some and of the output matrix."""
    config, roles = engine.config, engine.capabilities.adapters
    some = [role for role in ("q", "v", "up", "altup_router", "altup_spread", "input_out") if role in roles]
    return [
        random_adapter(config, rank=3, seed=1, roles=roles),
        random_adapter(config, rank=18, seed=2, roles=some, head=True),
    ]


async def passes(engine: hw.Engine, only: int | None = None) -> list[np.ndarray]:
    """Prompts and single rows under different adapters, in shared steps; or one of the sequences alone."""
    one, two = adapters(engine)
    mixes: list[Any] = [[(one, 1.0)], [], [(one, 0.5), (two, -0.5)], [(two, 2.0)]]
    mixes = [mix for i, mix in enumerate(mixes) if only in (None, i)]
    contexts = [engine.context() for _ in mixes]
    found = []
    for count in (2, 1):
        running = []
        for i, (context, mix) in enumerate(zip(contexts, mixes, strict=True)):
            forward = context.forward().input(tokens(count, only or i))
            for adapter, scale in mix:
                forward.adapter(adapter, scale)
            handles = [forward.probe(row, hw.Logits()) for row in range(count)]
            running.append((forward, handles))
        with engine._lock:
            executions = [forward.execute() for forward, _ in running]
        outs = await asyncio.gather(*executions)
        found += [out.logits(h) for out, (_, handles) in zip(outs, running, strict=True) for h in handles]
    for context in contexts:
        context.release()
    return found


def run(monkeypatch: pytest.MonkeyPatch, mode: str, decoder: Decoder, **options: Any) -> list[np.ndarray]:
    monkeypatch.setenv("HEADWAY_NATIVE", mode)
    with hw.Engine(decoder, pages=64, threads=1, **options) as engine:
        assert engine.info.runner == ("torch" if mode == "off" else "triton")
        return engine.run(passes)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=SLOWER)])
def test_rows_under_adapters_equal_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_model(family, device=DEVICE, **SIZES)
    found, expected = (run(monkeypatch, mode, decoder) for mode in ("triton", "off"))
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() <= 1e-4 * max(1.0, np.abs(other).max())


SIDE_BY_SIDE = next(iter(STREAMS.values()))


def test_residuals_side_by_side_under_adapters_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_model(device=DEVICE, **SIDE_BY_SIDE)
    found, expected = (run(monkeypatch, mode, decoder) for mode in ("triton", "off"))
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() <= 1e-4 * max(1.0, np.abs(other).max())


@pytest.mark.slow
def test_their_deterministic_rows_do_not_depend_on_adapters_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    decoder = random_model(device=DEVICE, **SIDE_BY_SIDE)
    with hw.Engine(decoder, pages=64, threads=1, deterministic=True) as engine:
        together = engine.run(passes)  # of each sequence two rows in one step, and then one
        for i in range(4):
            engine.cache.clear()
            np.testing.assert_array_equal(engine.run(passes, i), [*together[2 * i : 2 * i + 2], together[8 + i]])


@pytest.mark.parametrize("head_bias", [False, pytest.param(True, marks=SLOWER)])
def test_logits_that_are_scaled_and_capped_equal_torch(*, head_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of inner layers, and of a row that is read again."""
    what = Description(logit_scale=0.5, logit_cap=2.0, head_bias=head_bias)
    decoder = random_model(device=DEVICE, description=what, **SIZES)
    adapter = random_adapter(decoder.config, rank=3, seed=1, roles=("q",), head=True)

    async def one_pass(engine: hw.Engine) -> list[np.ndarray]:
        async with engine.context() as context:
            forward = context.forward().input([1, 2, 3]).adapter(adapter)
            first, lens = forward.probe(1, hw.Logits()), forward.probe(2, hw.LogitLens([1], 97))
            out, again = await forward.execute(), context.forward()
            last = again.probe(-1, hw.Logits())
            found = [out.logits(first), (await again.execute()).logits(last)]
            ids, probabilities = out.lens(lens)[0]
            return [*found, probabilities[np.argsort(ids)]]

    results = []
    for mode in ("triton", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        with hw.Engine(decoder, pages=8, threads=1) as engine:
            assert engine.info.runner == ("torch" if mode == "off" else "triton")
            results.append(engine.run(one_pass))
    for one, other in zip(*results, strict=True):
        assert np.abs(one - other).max() <= 1e-4 * max(1.0, np.abs(other).max())


def test_an_idle_engine_lets_go_of_what_was_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")

    async def one_pass(engine: hw.Engine, adapter: hw.Adapter) -> None:
        async with engine.context() as context:
            forward = context.forward().input([1, 2])
            forward.adapter(adapter).sample([-1], hw.Argmax())
            await forward.execute()

    with hw.Engine(random_model("llama", device=DEVICE, **SIZES), pages=8, threads=1) as engine:
        adapter = random_adapter(engine.decoder.config, rank=3, seed=1)  # type: ignore[union-attr]
        engine.run(one_pass, adapter)
        assert engine.stats().adapters == 1
        engine.unload_adapter(adapter)
        engine.cache.clear()
        eventually(lambda: gc.collect() >= 0 and engine.stats().adapters == 0)  # the worker may be at its step's end


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_rows_under_adapters_beside_quantized_weights(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against dequantized weights on torch, whose rows are rounded as the format says and whose adapters' are not."""
    decoder = quantize_decoder(random_model("llama", device=DEVICE, mlp_bias=True, **SIZES), kind)
    found = run(monkeypatch, "triton", decoder)
    expected = run(monkeypatch, "off", float_decoder(decoder))
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() <= 2e-2 * max(1.0, np.abs(other).max())
