"""Weights to a CUDA device, in chunks from the file: equal weights, bounded host memory, a pool sized by a trial.

Needs a GPU and random models only. Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headway as hw
from headway.base.system import log as notes
from headway.models.decoder import Decoder
from headway.models.files.gguf import KINDS, BlockFormat
from headway.models.files.mapped import Span, map_file, unmap
from headway.models.files.staging import Staging
from headway.models.weights.load_tensors import load_model
from headway.runtime.memory import FRACTION
from headway.testing import random_model
from support.plain_files import finite_bytes, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BIG: dict[str, Any] = {
    "layers": 6,
    "hidden": 1024,
    "heads": 8,
    "kv_heads": 4,
    "inner": 4096,
    "vocab": 8000,
}  # 200 MB in bfloat16
MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what an engine before has left
    torch.cuda.empty_cache()
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


def assert_equal_weights(here: Decoder, there: Decoder) -> None:
    assert there.device.type == "cuda"
    pairs = [(here.embedding, there.embedding), (here.output, there.output), (here.final_norm, there.final_norm)]
    for one, other in zip(here.layers, there.layers, strict=True):
        pairs += [(one.input_norm, other.input_norm), (one.mlp_norm, other.mlp_norm)]
        pairs += [(getattr(one, n).weight, getattr(other, n).weight) for n in ("qkv", "out", "gate_up", "down")]
    for one, other in pairs:
        assert torch.equal(one, other.cpu())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "stored", [torch.bfloat16, torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_the_weights_are_those_of_the_plain_loader(tmp_path: Path, stored: torch.dtype) -> None:
    folder = write_llama(tmp_path, dtype=stored, vocab=5001, hidden=256, inner=512)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        here = load_model(folder, dtype=dtype, device=CPU)
        for size in (100_000, 64 * MIB):
            assert_equal_weights(here, load_model(folder, dtype=dtype, device=CUDA, staging=Staging(CUDA, size)))


def test_host_memory_is_bounded_by_the_buffers(tmp_path: Path) -> None:
    load_model(write_llama(tmp_path / "small"), dtype=torch.bfloat16, device=CUDA)  # what torch keeps for good is there
    folder, size, seen = write_llama(tmp_path / "big", **BIG), 8 * MIB, [0]
    assert (folder / "model.safetensors").stat().st_size > 180e6
    before = resident()
    there = load_model(
        folder,
        dtype=torch.bfloat16,
        device=CUDA,
        staging=Staging(CUDA, size),
        progress=lambda done, total: seen.append(resident() - before),
    )
    assert max(*seen, resident() - before) < 2 * size + 48 * MIB
    assert_equal_weights(load_model(folder, dtype=torch.bfloat16, device=CPU), there)


def test_no_weight_is_on_the_device_twice(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, **BIG)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    there = load_model(folder, dtype=torch.bfloat16, device=CUDA)
    assert there.layers
    weights = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before < weights + 2 * MIB


@pytest.mark.parametrize("kind", [*KINDS, "F64"])
@pytest.mark.parametrize("pairs", [0, 8])
def test_every_stored_type_becomes_the_numbers_it_is_on_a_cpu(tmp_path: Path, kind: str, pairs: int) -> None:
    packing = KINDS.get(kind) or BlockFormat(1, 8)
    rows, width = 64, 2 * packing.block if packing.block > 1 else 96
    count = rows * width // packing.block * packing.nbytes
    (tmp_path / "raw").write_bytes(finite_bytes(count + 3))
    data = map_file(tmp_path / "raw")
    found = []
    for device in (CPU, CUDA):
        target = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
        with Staging(device, 5000) as staging:
            staging.send(Span(data, 3, count), kind, target, "w", pairs=pairs)
        found.append(target.cpu())
    unmap(data)
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))


def test_a_number_that_does_not_fit_is_refused_with_its_value(tmp_path: Path) -> None:
    values = torch.zeros(3000)
    values[1234] = 1e6
    (tmp_path / "raw").write_bytes(values.numpy().tobytes())
    data = map_file(tmp_path / "raw")
    target = torch.empty(3000, dtype=torch.float16, device=CUDA)
    with (
        pytest.raises(hw.Unsupported, match=r"w, stored as F32: the value 1e\+06 does not fit float16"),
        Staging(CUDA, 4000) as staging,
    ):
        staging.send(Span(data, 0, 12000), "F32", target, "w")
    unmap(data)


# -- memory ----------------------------------------------------------------------------------------------------------


async def first(engine: hw.Engine) -> list[int]:
    async with engine.context() as ctx:
        return await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=4, stop_only=True).tokens()


def test_the_pool_takes_what_a_trial_leaves(tmp_path: Path) -> None:
    folder, full, most = write_llama(tmp_path, **BIG), 32 * 2048 // 16, 0.95e9
    with hw.Engine(folder, device="cuda", pages=64) as engine:  # libraries are loaded once in a process
        engine.run(first)
    gc.collect()
    torch.cuda.empty_cache()
    before, whole = torch.cuda.mem_get_info()
    with hw.Engine(folder, device="cuda", memory_fraction=most / whole) as engine:
        assert 512 // 16 <= engine.stats().pages_total < full
        for _ in range(3):
            assert engine.run(first)
        assert before - torch.cuda.mem_get_info()[0] <= most
    with hw.Engine(folder, device="cuda") as engine:
        assert engine.stats().pages_total == full
        assert before - torch.cuda.mem_get_info()[0] < FRACTION * whole


def test_too_small_a_share_is_refused_with_the_sum(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, **BIG)
    whole = torch.cuda.mem_get_info()[1]
    with pytest.raises(hw.OutOfMemory, match=r"libraries take .* MiB, a step .* graphs .* left, which is \d+ pages"):
        hw.Engine(folder, device="cuda", memory_fraction=0.3e9 / whole)
    with pytest.raises(hw.OutOfPages, match="at most"):
        hw.Engine(folder, device="cuda", pages=1 << 24)


def test_running_out_while_loading_says_so_in_numbers(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, **BIG)
    torch.cuda.set_per_process_memory_fraction(100e6 / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(hw.OutOfMemory, match=r"ran out while loading the weights: .* asked for .* free .* try"):
            hw.Engine(folder, device="cuda", pages=4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# -- graphs ----------------------------------------------------------------------------------------------------------


def test_captures_are_told_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")

    async def together(engine: hw.Engine, count: int) -> None:
        import asyncio

        async def one(n: int) -> None:
            async with engine.context() as ctx:
                await ctx.fill([n + 1]).generate(hw.Argmax(), max_tokens=8, stop_only=True).tokens()

        await asyncio.gather(*(one(n) for n in range(count)))

    with (
        caplog.at_level(logging.INFO, logger=notes.LOGGER),
        hw.Engine(random_model(device="cuda"), device="cuda", pages=256) as engine,
    ):
        graphs = engine._loop._runner._graphs  # type: ignore[attr-defined]
        graphs.most = 6
        for count in (1, 2, 4, 8, 16, 1, 2, 4, 8, 16):
            engine.run(together, count)
            assert len(graphs.graphs) <= 6
    assert any("capturing a graph of" in record.getMessage() for record in caplog.records)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails, and looking for it finds nothing
import numpy as np
import headway as hw
from headway.testing import random_model

async def logits(engine):
    async with engine.context() as ctx:
        forward = ctx.forward().input([1, 2, 3])
        handle = forward.probe(-1, hw.Logits())
        return (await forward.execute()).logits(handle)

with (
    hw.Engine(random_model(device="cuda"), device="cuda", pages=8) as there,
    hw.Engine(random_model(device="cpu"), device="cpu", pages=8) as here,
):
    assert there.info.runner == "torch", there.info.runner
    assert np.abs(there.run(logits) - here.run(logits)).max() < 1e-4
print("same")
"""


def test_without_triton_torch_computes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.stdout.strip() == "same", done.stderr
