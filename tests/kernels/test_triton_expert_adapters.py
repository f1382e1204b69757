"""Adapters of experts, shared ones and routers in Triton against torch. Without a GPU the kernels run in Triton's
interpreter."""

from __future__ import annotations

import asyncio
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
from headway.models.description import Description, Experts  # noqa: E402
from headway.runtime.runners.cuda import model as cuda_model  # noqa: E402
from headway.testing import random_adapter, random_model  # noqa: E402
from support.checks import assert_close, random_tokens  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SLOWER = () if DEVICE == "cuda" else pytest.mark.slow
SIZES: dict[str, Any] = {"layers": 1, "hidden_size": 32, "intermediate_size": 40, "heads": 2, "kv_heads": 1}
EXPERTS = {
    "shared": Experts(count=5, per_token=2, size=20, shared_size=24),
    "clamped": Experts(count=4, per_token=3, size=16, bias=True, router_bias=True, clamp=1.0, alpha=1.7),
    "weighted inputs": Experts(count=4, per_token=2, size=20, shared_size=16, shared_gated=False, sigmoid_inputs=True),
}
OF_EXPERTS = ("expert_gate", "expert_up", "expert_down")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: there is no device to keep busy."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_model, "PROGRAMS", 8)


async def passes(engine: hw.Engine) -> list[np.ndarray]:
    """Prompts and single rows under different adapters, in shared steps."""
    roles, config = engine.capabilities.adapters, engine.config
    one = random_adapter(config, rank=3, seed=1, roles=roles)
    two = random_adapter(config, rank=18, seed=2, roles=OF_EXPERTS)
    three = random_adapter(config, rank=5, seed=3, roles=("q", *roles[-4:]))
    mixes = [[(one, 1.0)], [], [(one, 0.5), (two, -0.5)], [(two, 2.0)], [(three, 1.0)]]
    contexts, found = [engine.context() for _ in mixes], list[np.ndarray]()
    for count in (2, 1):
        running = []
        for i, (context, mix) in enumerate(zip(contexts, mixes, strict=True)):
            forward = context.forward().input(random_tokens(97, count, i))
            for adapter, scale in mix:
                forward.adapter(adapter, scale)
            running.append((forward, [forward.probe(row, hw.Logits()) for row in range(count)]))
        with engine._lock:
            executions = [forward.execute() for forward, _ in running]
        outs = await asyncio.gather(*executions)
        found += [out.logits(h) for out, (_, handles) in zip(outs, running, strict=True) for h in handles]
    for context in contexts:
        context.release()
    return found


def run(monkeypatch: pytest.MonkeyPatch, mode: str, decoder: Decoder) -> list[np.ndarray]:
    monkeypatch.setenv("HEADWAY_NATIVE", mode)
    with hw.Engine(decoder, pages=64, threads=1) as engine:
        assert engine.info.runner == ("torch" if mode == "off" else "triton")
        return engine.run(passes)


@pytest.mark.parametrize("name", ["shared", *(pytest.param(n, marks=SLOWER) for n in ("clamped", "weighted inputs"))])
def test_rows_under_adapters_of_experts_equal_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_model(device=DEVICE, description=Description(experts=EXPERTS[name]), **SIZES)
    found, expected = (run(monkeypatch, mode, decoder) for mode in ("triton", "off"))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
