"""Tensor parallel on a CUDA device, with NCCL at world size 1: the kernels, graphs and messages of many ranks, on one.

Needs a GPU and random models only. Run with `pytest -m gpu tests/gpu`. More than one GPU was never used.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import headway as hw
from headway.base.config import settings
from headway.base.system.device import Device
from headway.runtime.runners.parallel.cuda import ParallelCudaRunner
from headway.runtime.runners.select import open_ranks
from headway.testing import random_adapter, random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = {"heads": 4, "kv_heads": 2, "layers": 3, "vocab_size": 131}


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[hw.Engine, hw.Engine]]:
    """The same model as a rank of one, and as ever: in float32, or with the same bits, so that tokens are the same."""
    dtype = "bfloat16" if request.param else "float32"
    model = random_model("qwen2", dtype=dtype, device="cuda", **MODEL)  # type: ignore[arg-type]
    backend = open_ranks(model, 1, dtype="auto", device=Device("cuda"), threads=1, quantize=None, settings=settings())
    assert backend.ranks is not None
    how = {"pages": 200, "deterministic": request.param}
    try:
        with hw.Engine(backend, **how) as ranks, hw.Engine(model, **how) as plain:
            yield ranks, plain
    finally:
        backend.ranks.close()


async def generated(engine: hw.Engine, adapter: hw.Adapter | None) -> list[int]:
    async with engine.context() as ctx:
        ctx.fill(list(range(1, 40)))
        return await ctx.generate(hw.TopK(5, seed=3), max_tokens=40, adapter=adapter).tokens()


def test_a_rank_of_one_captures_graphs_and_generates_the_same(pair: tuple[hw.Engine, hw.Engine]) -> None:
    ranks, plain = pair
    assert ranks.info.runner == "triton, 1 ranks"
    for adapter in (None, random_adapter(ranks.config, rank=4, seed=1)):
        one, other = (engine.run(generated, adapter) for engine in pair)
        assert one == other
    runner = ranks._loop._runner
    assert isinstance(runner, ParallelCudaRunner)
    assert len(runner.captured) >= 2  # a step and its head
    assert plain.info.runner == "triton"


def test_probes_and_exports_pass_through_the_ranks(pair: tuple[hw.Engine, hw.Engine]) -> None:
    rows: list[list[np.ndarray]] = []
    for engine in pair:
        context = engine.context()
        forward = context.forward().input(list(range(50)))
        handles = [
            forward.probe(-1, hw.Logits()),
            forward.probe(7, hw.Hidden(2)),
            forward.probe(9, hw.AttentionScores(1)),
        ]
        out = forward.execute().result()
        found = [out.logits(handles[0]), out.hidden(handles[1]), out.attention(handles[2])]  # type: ignore[arg-type]
        context.save("exported", durable=True)
        opened = engine.open("exported")
        assert opened is not None
        forward = opened.forward()
        last = forward.probe(-1, hw.Logits())
        rows.append([*found, forward.execute().result().logits(last)])
    for one, other in zip(*rows, strict=True):
        assert np.abs(one - other).max() <= 2e-2 * max(1.0, float(np.abs(other).max()))
