"""Whole prompts by cuDNN's attention against ours, through the engine and kernel by kernel.

Needs a GPU and random models only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.testing import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (1400, 2048, 2900)  # padded, as it is, and in two steps


async def last_logits(engine: hw.Engine, tokens: list[int]) -> np.ndarray:
    """Logits of the last rows of a prompt, and of a token after it."""
    async with engine.context() as ctx:
        forward = ctx.forward().input(tokens)
        handles = [forward.probe(row, hw.Logits()) for row in (-3, -2, -1)]
        out = await forward.execute()
        after = ctx.forward().input([7])
        handle = after.probe(0, hw.Logits())
        return np.stack([*(out.logits(h) for h in handles), (await after.execute()).logits(handle)])


@pytest.mark.parametrize("dim", [64, 128])
def test_prompts_by_cudnn_have_the_logits_of_our_kernel(dim: int) -> None:
    size: dict[str, Any] = {"hidden_size": 256, "heads": 4, "kv_heads": 2, "head_dim": dim, "max_positions": 8192}
    model = random_model(device="cuda", dtype="bfloat16", **size)
    found: dict[bool, list[np.ndarray]] = {}
    prompts = [np.random.default_rng(n).integers(0, 97, n).tolist() for n in LENGTHS]
    for by_cudnn in (True, False):
        with hw.Engine(model, device="cuda", pages=600, max_batch_tokens=2048) as engine:
            cuda = engine._loop._runner.model  # type: ignore[attr-defined]
            assert cuda.takes_prompts == (torch.cuda.get_device_capability()[0] == 9)
            cuda.takes_prompts &= by_cudnn
            found[by_cudnn] = [engine.run(last_logits, prompt) for prompt in prompts]
    for ours, theirs in zip(found[False], found[True], strict=True):
        assert np.abs(ours - theirs).max() <= 0.03 * np.abs(ours).max()
