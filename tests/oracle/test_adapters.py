"""Adapters against peft: the same logits over the dense base in float32, for every family and every linear layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headway as hw
from support.hf import save_hf, variant
from support.lora import logits_of, save_lora, with_lora

TOKENS = [5, 17, 3, 88, 41, 2, 9, 30, 61, 7, 19, 23, 4, 77, 50, 12, 8, 91, 33]
FAMILIES = ["llama-biases", "llama-linear-headdim10", "mistral-window", "qwen2-mqa", "qwen3-biases-mha"]


@pytest.fixture(params=["native", "torch"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("HEADWAY_NATIVE", "off")
    return request.param


def logits(engine: hw.Engine, tokens: list[int], *uses: tuple[hw.Adapter, float]) -> np.ndarray:
    """The logits [T, V] of a sequence under adapters."""

    async def program(engine: hw.Engine) -> np.ndarray:
        async with engine.context() as ctx:
            fwd = ctx.forward().input(tokens)
            for adapter, scale in uses:
                fwd.adapter(adapter, scale)
            handles = [fwd.probe(i, hw.Logits()) for i in range(len(tokens))]
            out = await fwd.execute()
            return np.stack([out.logits(handle) for handle in handles])

    return engine.run(program)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_gives_the_logits_of_peft(tmp_path: Path, runner: str, name: str) -> None:
    _, model = variant(name)
    wrapped = with_lora(model)
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", threads=1, pages=16) as engine:
        found, plain = logits(engine, TOKENS, (adapter, 1.0)), logits(engine, TOKENS)
    close(found, logits_of(wrapped, TOKENS))
    close(plain, logits_of(model, TOKENS))
    assert np.abs(found - plain).max() > 0.1 * np.abs(plain).max()
