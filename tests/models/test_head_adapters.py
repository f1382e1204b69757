"""Adapters of an output matrix whose logits are scaled, capped or both: added to its products, before these."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import headway as hw
from support.checks import all_logits, assert_close, random_tokens
from support.hf import save_hf
from support.hf_families import family_model
from support.lora import logits_of, state_of, with_lora

NAMES = ("granite", "gemma2", pytest.param("cohere2", marks=pytest.mark.slow))


def head_adapter(model: object) -> tuple[hw.Adapter, object]:
    wrapped = with_lora(model, target_modules=["q_proj", "lm_head"])
    return hw.Adapter.from_tensors(state_of(wrapped), alpha=6), wrapped


@pytest.mark.parametrize("native", ["require", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens_are_peft_s(name: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    _, model = family_model(name)
    tokens, (adapter, wrapped) = random_tokens(97, 21), head_adapter(model)
    expected = logits_of(wrapped, tokens)
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=16, threads=1) as engine:
        assert_close(all_logits(engine, tokens, adapter), expected)
        assert np.abs(all_logits(engine, tokens) - expected).max() > 0.01

        async def first(count: int) -> list[int]:
            async with engine.context().fill(tokens) as context:
                return await context.generate(hw.Argmax(), max_tokens=count, adapter=adapter).tokens()

        assert engine.run(lambda _: first(1)) == [expected[-1].argmax()]


@pytest.mark.parametrize("native", ["require", "off"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_rows_beside_an_adapter_of_the_head_keep_their_bits(
    quantize: str | None, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in the step, by the reader and at inner layers."""
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    _, model = family_model("gemma2")
    adapter, _ = head_adapter(model)
    how = {"dtype": "float32"} if quantize is None else {"quantize": quantize}
    with hw.Engine(save_hf(tmp_path, model), pages=32, threads=2, deterministic=True, **how) as engine:

        async def logits(mix: hw.Adapter | None) -> list[np.ndarray]:
            async with engine.context() as context:
                forward = context.forward().input(random_tokens(97, 9))
                if mix is not None:
                    forward.adapter(mix)
                handles = forward.probe(-1, hw.Logits()), forward.probe(-2, hw.Logits())
                lens, token = forward.probe(-1, hw.LogitLens([1], 5)), forward.sample([-1], hw.Argmax())
                out = await forward.execute()
                ids, probabilities = out.lens(lens)[0]
                read = [out.logits(handle) for handle in handles]
                assert out.token(token) == read[0].argmax()
                return [*read, ids, probabilities]

        async def together(_: object) -> list[list[np.ndarray]]:
            return await asyncio.gather(logits(None), logits(adapter), logits(None))

        alone, adapted = engine.run(lambda _: logits(None)), engine.run(lambda _: logits(adapter))
        for found, expected in zip(engine.run(together), (alone, adapted, alone), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not np.array_equal(alone[3], adapted[3])
