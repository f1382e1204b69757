"""Validation is by other code than what it validates: a wrong constant in a kernel is seen, in every format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import headway as hw
from headway.kernels import triton
from headway.kernels.native.library import open_library
from headway.testing import random_model
from support.checks import random_tokens
from support.gguf_files import write_gguf
from support.hf import random_hf, save_hf
from support.hf_families import family_model
from support.sweeps import swept

needs_native = pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")
needs_triton = pytest.mark.skipif(triton.missing() is not None, reason=triton.missing() or "-")

V, LAYERS = 97, 2
PROMPT = random_tokens(V, 40)
FORMATS = ("f32", "F16", "Q4_0", "Q6_K", "int8", "int4")
WRONG = {"scale": 4.0, "rope_scales": 1.2, "eps": 1e4, "residual_scale": 1.1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """A random model in every format: its path, and the options of its engine."""
    folder = tmp_path_factory.mktemp("models")
    _, model = random_hf("llama", 5, hidden_size=256, intermediate_size=256, num_attention_heads=8, head_dim=32)
    plain = save_hf(folder / "plain", model)
    found: dict[str, tuple[Path, dict[str, Any]]] = {"f32": (plain, {}), "int8": (plain, {"quantize": "int8"})}
    found["int4"] = (plain, {"quantize": "int4"})
    for kind in ("F16", "Q4_0", "Q6_K"):
        found[kind] = write_gguf(folder / f"{kind}.gguf", model, kind=kind), {}
    return found


@pytest.fixture(params=FORMATS)
def native(
    request: pytest.FixtureRequest, models: dict[str, tuple[Path, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[hw.InferenceEngine]:
    monkeypatch.setenv("HEADWAY_NATIVE", "require")
    path, options = models[request.param]
    with hw.InferenceEngine(path, pages=32, threads=2, **options) as engine:
        yield engine


def steps(engine: hw.InferenceEngine) -> None:
    """A prompt and two tokens, each validated."""
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        engine.decode_step(state, 5)
        engine.decode_step(state, 6)


@needs_native
def test_the_native_step_agrees_with_the_torch_reference_in_every_format(native: hw.InferenceEngine) -> None:
    native.enable_validation_diagnostics()
    steps(native)
    assert [d.position for d in native.diagnostics] == [39, 40, 41]
    assert all(d.passed for d in native.diagnostics)
    assert max(d.logits for d in native.diagnostics) < 1e-5
    assert native.info.runner.startswith("native")


@needs_native
@pytest.mark.parametrize("name", swept(["gemma3", "gpt-oss", "cohere2", "qwen2-moe", "gpt2"], 2))
def test_the_native_step_of_other_families_agrees_in_8_bits(name: str, tmp_path: Path) -> None:
    with hw.InferenceEngine(save_hf(tmp_path, family_model(name)[1]), pages=8, threads=2, quantize="int8") as engine:
        engine.enable_validation_diagnostics()
        steps(engine)
        assert max(d.logits for d in engine.diagnostics) < 1e-5


@needs_native
@pytest.mark.parametrize("constant", WRONG)
def test_a_wrong_constant_of_the_native_step_is_seen(native: hw.InferenceEngine, constant: str) -> None:
    model: Any = native.engine._loop._runner.model  # type: ignore[attr-defined]
    if constant == "rope_scales":
        model._bound._rope_scales *= WRONG[constant]
    else:
        setattr(model._struct, constant, getattr(model._struct, constant) * WRONG[constant])
    native.enable_validation_diagnostics()
    with hw.DecodeState() as state:
        with pytest.raises(hw.ValidationFailed, match="this step and the reference differ at position 39: layer 0"):
            native.prefill_batched(state, PROMPT)
        assert state.position == 0
    (found,) = native.diagnostics
    assert not found.passed
    assert found.logits > 100 * found.tolerance


@needs_triton
@pytest.mark.parametrize("kind", swept(["float32", "int8"]))
def test_a_wrong_constant_of_the_triton_kernels_is_seen(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In Triton's interpreter, where there is no device. Its int8 takes activations in float16, and so do we."""
    from headway.kernels.triton.attention import PagedKV
    from headway.models.quantized.cuda import quantize_decoder
    from headway.runtime.runners.cuda.model import CudaModel, DeviceStep

    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    attend, model = CudaModel._attend, random_model(vocab_size=32, hidden_size=32, intermediate_size=32, head_dim=16)

    def wrong(self: CudaModel, q: Tensor, mixed: Tensor, paged: PagedKV, step: DeviceStep) -> None:
        attend(self, q, mixed, replace(paged, scale=4 * paged.scale), step)

    decoder = model if kind == "float32" else quantize_decoder(model, "int8")
    with hw.InferenceEngine(decoder, pages=4, threads=1) as engine, hw.DecodeState() as state:
        assert engine.info.runner == "triton"
        engine.enable_validation_diagnostics()
        engine.prefill_batched(state, [1, 2, 3])
        monkeypatch.setattr(CudaModel, "_attend", wrong)
        with pytest.raises(hw.ValidationFailed, match="position 3: layer 0"):
            engine.decode_step(state, 6)
        right, found = engine.diagnostics
        assert right.passed
        assert 0 < right.logits < 2e-3
        assert found.logits > 10 * found.tolerance


@pytest.mark.parametrize("page_size", [1, 16])
def test_validated_prefills_compute_every_row_of_both_ways(page_size: int) -> None:
    """Neither finds the pages of the other, nor those of an earlier prompt, in the prefix cache."""
    with hw.InferenceEngine(random_model(vocab_size=V), pages=256, page_size=page_size, threads=1) as engine:
        before = after = engine.engine.stats()
        for _ in range(2):
            before = after
            with hw.DecodeState() as state:
                engine.prefill_batched(state, PROMPT, validate=True)
                engine.prefill_batched(state, [1, 2, 3], validate=True)
                assert state.context is not None
                assert state.context.inner().committed_page_count == 43 // page_size
            after = engine.engine.stats()
            assert after.cache_hits == before.cache_hits
            assert after.tokens - before.tokens == 2 * 43
        with hw.DecodeState() as state:  # what was validated is found by others
            engine.prefill_batched(state, PROMPT)
        assert engine.engine.stats().cache_hits > after.cache_hits


def test_a_fault_in_steps_of_several_rows_is_seen_by_validated_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.runtime.runners.torch import TorchRunner

    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    right = TorchRunner.step

    def wrong(self: TorchRunner, batch: Any) -> Any:
        step = right(self, batch)
        if len(batch.tokens) > 1:
            step.positions[0] += 3  # the key in the first slot is wrong
        return step

    with hw.InferenceEngine(random_model(vocab_size=V), pages=32, threads=1) as engine, hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT[:30], validate=True)
        monkeypatch.setattr(TorchRunner, "step", wrong)
        with pytest.raises(hw.ValidationFailed, match="batched prefill and token by token differ at position 39"):
            engine.prefill_batched(state, PROMPT[30:], validate=True)
        assert state.position == 30
        np.testing.assert_array_equal(state.context.tokens, PROMPT[:30])  # type: ignore[union-attr]
