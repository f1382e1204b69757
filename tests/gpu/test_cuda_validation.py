"""Validation on a CUDA device: steps against torch in float32 on the CPU, in every format, right and wrong ones.

Needs a GPU and random models only. Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import headway as hw
from headway.models.quantized.cuda import quantize_decoder
from headway.testing import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = np.random.default_rng(0).integers(0, 97, 120).tolist()
CASES = [
    ("float32", None),
    ("bfloat16", None),
    ("float16", None),
    ("float32", "int8"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("bfloat16", "fp8"),
]


def engine_of(dtype: str, kind: str | None) -> hw.InferenceEngine:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "layers": 3}
    decoder = random_model("qwen3", device="cuda", dtype=dtype, **sizes)
    if kind is not None:
        decoder = quantize_decoder(decoder, kind)  # type: ignore[arg-type]
    engine = hw.InferenceEngine(decoder, pages=64)
    assert engine.info.runner == "triton"
    engine.enable_validation_diagnostics()
    return engine


@pytest.mark.parametrize(("dtype", "kind"), CASES)
@pytest.mark.parametrize("count", [7, 100])
def test_steps_of_any_number_of_rows_agree_with_the_reference(dtype: str, kind: str | None, count: int) -> None:
    with engine_of(dtype, kind) as engine, hw.DecodeState() as state:
        engine.prefill_batched(state, TOKENS[:count])
        for token in TOKENS[count : count + 3]:
            engine.decode_step(state, token)
        assert all(d.passed for d in engine.diagnostics)
        assert len(engine.diagnostics) == 4
        assert max(d.logits for d in engine.diagnostics) > 0


@pytest.mark.parametrize(("dtype", "kind"), CASES)
def test_a_wrong_scale_of_attention_is_seen(monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str | None) -> None:
    from headway.kernels.triton.attention import PagedKV
    from headway.runtime.runners.cuda.model import CudaModel, DeviceStep

    attend = CudaModel._attend

    def wrong(self: CudaModel, q: Tensor, mixed: Tensor, paged: PagedKV, step: DeviceStep) -> None:
        attend(self, q, mixed, replace(paged, scale=4 * paged.scale), step)

    with engine_of(dtype, kind) as engine, hw.DecodeState() as state:
        engine.prefill_batched(state, TOKENS[:20])
        monkeypatch.setattr(CudaModel, "_attend", wrong)
        with pytest.raises(hw.ValidationFailed, match="position 20: layer 0"):
            engine.decode_step(state, TOKENS[20])
        assert engine.diagnostics[-1].logits > 2 * engine.diagnostics[-1].tolerance
        assert state.position == 20
