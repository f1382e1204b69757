"""Quantized weights on the device: their values, and their matmul with one row and with several."""

from __future__ import annotations

import asyncio
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.base.errors import Unsupported  # noqa: E402
from headway.kernels.reference.mlp import gated_silu  # noqa: E402
from headway.kernels.triton import quantized  # noqa: E402
from headway.kernels.triton.quantized import BlockKind, QuantizedTile, QuantKind  # noqa: E402
from headway.kernels.triton.quantized_tiles import ByteTile, SplitSums, pick_byte_tile  # noqa: E402
from headway.models.quantized.cuda import quantize_decoder  # noqa: E402
from headway.testing import random_model  # noqa: E402
from support.hf import random_hf, save_hf  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
KINDS = pytest.mark.parametrize("kind", quantized.BLOCK_KINDS)
SLOWER = () if DEVICE == "cuda" else pytest.mark.slow  # in the interpreter
ONE_KIND = pytest.mark.parametrize(
    "kind", [quantized.KINDS[0], *(pytest.param(kind, marks=SLOWER) for kind in quantized.KINDS[1:])]
)
LIMIT = 3e-6  # sums are float32, in another order
HALF = 5e-4  # what comes out in float16 has eleven bits


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def matrix(kind: BlockKind, n: int, k: int, *, gated: bool = False) -> quantized.CudaQuantizedMatrix:
    return quantized.quantize(draw(n, k, seed=1) / k**0.5, draw(n, seed=2), kind=kind, gated=gated)


def near(found: torch.Tensor, expected: torch.Tensor, limit: float = LIMIT) -> None:
    assert float((found - expected).norm()) <= limit * float(expected.norm())


@KINDS
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(16, 64, False), (21, 96, False), (50, 160, False), (2, 32, True), (42, 96, True)]
)
def test_codes_are_the_nearest_to_their_weights(kind: BlockKind, n: int, k: int, gated: bool) -> None:
    weight = draw(n, k)
    found = quantized.quantize(weight, kind=kind, gated=gated).weight
    assert found.shape == weight.shape
    if kind == "int4":  # no weight is farther than a step from its code, and a step is an eighth of a group's largest
        step = weight.abs().amax(1, keepdim=True) / 8
        assert float((found - weight).norm() / weight.norm()) < 0.12
    else:
        step = weight.abs().amax(1, keepdim=True) / 127 / 2
    assert bool(((found - weight).abs() <= 1.01 * step).all())


@KINDS
def test_every_weight_has_a_place_of_its_own(kind: BlockKind) -> None:
    """A matrix of zeros but for one weight is that weight and zeros again."""
    for n, k in ((0, 0), (7, 15), (8, 16), (15, 63), (16, 64), (20, 95), (3, 40), (11, 71)):
        weight = torch.zeros(22, 96, device=DEVICE)
        weight[n, k] = -1.0
        for gated in (False, True):
            w = quantized.quantize(weight, kind=kind, gated=gated)
            dense = torch.full((22, 96), 5.0, device=DEVICE)
            quantized.dequantize_into(w, dense)
            assert torch.equal(dense, weight)
            assert torch.equal(w.weight, weight)


@KINDS
def test_zeros_stay_zeros(kind: BlockKind) -> None:
    assert not quantized.quantize(torch.zeros(5, 64, device=DEVICE), kind=kind).weight.any()


def test_weights_of_many_slices_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(100, 96)
    for kind in quantized.BLOCK_KINDS:
        whole = quantized.quantize(weight, kind=kind, gated=True)
        with monkeypatch.context() as patch:
            patch.setattr(quantized, "SLICE", 16 * 96)
            sliced = quantized.quantize(weight, kind=kind, gated=True)
        assert torch.equal(whole.quants, sliced.quants)
        assert torch.equal(whole.scales, sliced.scales)


@KINDS
def test_inputs_that_fill_no_group_are_refused(kind: BlockKind) -> None:
    with pytest.raises(Unsupported, match="33"):
        quantized.quantize(draw(4, 33), kind=kind)


@KINDS
@pytest.mark.parametrize(("n", "k", "gated"), [(5, 32, False), (48, 320, False), (42, 96, True), (80, 1312, True)])
def test_a_matrix_is_written_out_as_it_is(kind: BlockKind, n: int, k: int, gated: bool) -> None:
    w = matrix(kind, n, k, gated=gated)
    for dtype in (torch.float32, torch.float16):
        dense = torch.full((n, k), float("nan"), dtype=dtype, device=DEVICE)
        quantized.dequantize_into(w, dense)
        assert torch.equal(dense, w.weight.to(dtype))


@KINDS
@pytest.mark.parametrize("rows", [1, 2, 9, 17, *(pytest.param(n, marks=SLOWER) for n in range(3, 17) if n != 9)])
def test_matmul_with_rows(kind: BlockKind, rows: int) -> None:
    n, k = [(5, 32), (33, 96), (18, 320)][rows % 3]
    x, w = draw(rows, k).half(), matrix(kind, n, k)
    expected = F.linear(x.float(), w.weight, w.bias)
    y = torch.full((rows, n), float("nan"), device=DEVICE)
    quantized.matmul(x, w, y)
    near(y, expected)
    onto = draw(rows, n, seed=4)
    before = onto.clone()
    quantized.matmul(x, w, onto, factor=16.0, add=True)
    near(onto, before + F.linear(16 * x.float(), w.weight, w.bias))


@KINDS
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=SLOWER), 9])
def test_gate_times_up(kind: BlockKind, rows: int) -> None:
    for n, k in ((21, 96), (48, 320)) if DEVICE == "cuda" else ((21, 96),):
        x, w = draw(rows, k).half(), matrix(kind, 2 * n, k, gated=True)
        expected = gated_silu(F.linear(x.float(), w.weight, w.bias), exact=False)
        y, half = draw(rows, n), draw(rows, n).half()
        quantized.matmul(x, w, y)
        near(y, expected)
        quantized.matmul(x, w, half)
        near(half.float() / quantized.INNER, expected, HALF)


@KINDS
@pytest.mark.parametrize(
    "tile",
    [
        QuantizedTile(1, 8, 8),
        pytest.param(QuantizedTile(2, 2, 2), marks=SLOWER),
        pytest.param(QuantizedTile(2, 16, 4), marks=SLOWER),
        QuantizedTile(2, 1, 4, wide=True),
        QuantizedTile(1, 1, 2, wide=True, columns=4),
    ],
)
def test_every_tile_gives_the_same(kind: BlockKind, tile: QuantizedTile) -> None:
    x, w = draw(11, 352).half(), matrix(kind, 48, 352)
    y = torch.empty(11, 48, device=DEVICE)
    quantized.matmul(x, w, y, tile=tile)
    near(y, F.linear(x.float(), w.weight, w.bias))


@pytest.mark.parametrize(
    "tile", [ByteTile(16, 32, 1), ByteTile(32, 64, 2, weights_first=False), ByteTile(16, 32, 1, splits=3)]
)
def test_tiles_of_bytes_give_the_same(tile: ByteTile) -> None:
    for rows, n, k, gated in ((19, 48, 352, False), (40, 21, 96, False), (17, 42, 160, True)):
        x, w = draw(rows, k).half(), matrix("int8", n, k, gated=gated)
        expected = F.linear(x.float(), w.weight, w.bias)
        expected = gated_silu(expected, exact=False) if gated else expected
        sums = SplitSums.of(n, rows, x.device, tile.splits)
        y, onto = (torch.ones(rows, expected.shape[1], device=DEVICE) for _ in range(2))
        for _ in range(2):  # what has arrived is forgotten
            quantized.matmul(x, w, y, tile=tile, sums=sums)
            near(y, expected)
        quantized.matmul(x, w, onto, tile=tile, sums=sums, add=True)
        near(onto, 1 + expected)
        if gated:
            own = draw(rows, n, seed=3)
            quantized.matmul(x, w, y, tile=tile, sums=sums, row_bias=own)
            near(y, gated_silu(F.linear(x.float(), w.weight) + own, exact=False))


def test_a_device_with_little_shared_memory_gets_fewer_stages() -> None:
    for rows, outputs, inputs in ((20, 4096, 4096), (64, 28672, 4096), (64, 4096, 14336), (32, 4096, 14336)):
        wide, small = (pick_byte_tile(rows, outputs, inputs, shared) for shared in (227 << 10, 99 << 10))
        assert 1 <= small.stages <= wide.stages
        assert small.rows >= rows
        used = 64 * small.deep * (2 * small.rows + small.outputs) * small.stages
        assert used <= 99 << 10
    assert pick_byte_tile(65, 4096, 4096, 99 << 10).splits == 1


@KINDS
@pytest.mark.parametrize(
    "tile", [None, *(pytest.param(QuantizedTile(1, *tile), marks=SLOWER) for tile in ((1, 1), (4, 2), (8, 8)))]
)
def test_one_row_alone(kind: BlockKind, tile: QuantizedTile | None) -> None:
    for n, k, gated in ((20, 96, False), (48, 2048, False), (42, 576, True)):
        x, w = draw(1, k).half(), matrix(kind, n, k, gated=gated)
        expected = F.linear(x.float(), w.weight, w.bias)
        expected = gated_silu(expected, exact=False) if gated else expected
        y = torch.ones(1, expected.shape[1], device=DEVICE)
        quantized.matmul(x, w, y, add=True, alone=True, tile=tile)
        near(y - 1, expected, 1e-5)


@KINDS
def test_a_row_is_the_same_alone_and_among_others(kind: BlockKind) -> None:
    x, w = draw(40, 352).half(), matrix(kind, 24, 352)
    among = torch.empty(40, 24, device=DEVICE)
    quantized.matmul(x, w, among)
    for some in (slice(0, 1), slice(3, 4), slice(39, 40), slice(5, 17), slice(20, 40)):
        alone = torch.empty(some.stop - some.start, 24, device=DEVICE)
        quantized.matmul(x[some], w, alone)
        assert torch.equal(alone, among[some])


@KINDS
def test_large_inputs_do_not_overflow(kind: BlockKind) -> None:
    """Sums are float32: inputs may be as large as float16 has them."""
    x = torch.full((2, 128), 60000.0, dtype=torch.float16, device=DEVICE)
    w = quantized.quantize(torch.ones(16, 128, device=DEVICE), kind=kind)
    y = torch.empty(2, 16, device=DEVICE)
    quantized.matmul(x, w, y)
    near(y, torch.full((2, 16), 128 * float(x[0, 0]), device=DEVICE), 1e-5)


# -- whole models --------------------------------------------------------------------------------------------------


async def logits(engine: hw.Engine, prompts: list[list[int]]) -> list[np.ndarray]:
    """Of each prompt's tokens, and of one more after it, all prompts at once."""

    async def one(prompt: list[int]) -> np.ndarray:
        async with engine.context() as context:
            rows = []
            for tokens in (prompt, [5]):
                forward = context.forward().input(tokens)
                handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
                out = await forward.execute()
                rows += [out.logits(h) for h in handles]
            return np.stack(rows)

    return list(await asyncio.gather(*(one(p) for p in prompts)))


@pytest.mark.slow
@ONE_KIND
def test_a_folder_is_quantized_as_it_is_read(kind: QuantKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file quantized and as floats: near, and nearer the more bits."""
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"head_dim": 16, "vocab_size": 60, "num_hidden_layers": 1}
    folder = save_hf(tmp_path, random_hf("qwen2", 3, **sizes)[1])
    prompts = [[1, 2, 3], [4]]
    with hw.Engine(folder, pages=16, quantize=kind, device=DEVICE, dtype="float32") as engine:
        assert engine.info.runner == "triton"
        assert engine.info.format == {"int4": "int4 in groups of 32, int8", "int8": "int8", "fp8": "fp8, int8"}[kind]
        found = engine.run(logits, prompts)
        alone = engine.run(logits, prompts[1:])[0]
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with hw.Engine(folder, pages=16, device=DEVICE, dtype="float32") as engine:
        expected = engine.run(logits, prompts)
    assert np.abs(found[1] - alone).max() <= 2e-3 * np.abs(alone).max()
    for one, other in zip(found, expected, strict=True):
        error = np.abs(one - other).mean() / other.std()
        assert 1e-4 < error < {"int4": 0.5, "int8": 0.08, "fp8": 0.3}[kind]


@pytest.mark.slow
@ONE_KIND
def test_many_rows_are_the_same_through_floats(kind: QuantKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt above FEW rows is computed with dequantized matrices, in pieces from the quants; activations are rounded
    to float16 in both, so that only the rounding of sums differs."""
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    monkeypatch.setattr(quantized, "FEW", 4)
    decoder = quantize_decoder(
        random_model("llama", device=DEVICE, intermediate_size=96, layers=1, vocab_size=40), kind
    )
    prompt = np.random.default_rng(0).integers(0, 40, 6).tolist()

    async def pieces(engine: hw.Engine, cuts: list[int]) -> np.ndarray:
        async with engine.context() as context:
            for start, stop in pairwise([0, *cuts]):
                await context.forward().input(prompt[start:stop]).execute()
            forward = context.forward().input(prompt[cuts[-1] if cuts else 0 :])
            handle = forward.probe(-1, hw.Logits())
            return (await forward.execute()).logits(handle)

    with hw.Engine(decoder, pages=32) as engine:
        whole, cut = engine.run(pieces, []), engine.run(pieces, [3])
    assert np.abs(whole - cut).max() <= 2e-5 * np.abs(whole).max()


@pytest.mark.slow
@ONE_KIND
def test_a_model_of_float16_is_near_one_of_float32(kind: QuantKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    found = []
    for dtype in ("float16", "float32"):
        decoder = random_model("llama", device=DEVICE, dtype=dtype, hidden_size=96, intermediate_size=96, layers=1)
        with hw.Engine(quantize_decoder(decoder, kind), pages=16) as engine:
            found.append(engine.run(logits, [[1, 2, 3], [4]]))
    for one, other in zip(*found, strict=True):
        assert np.abs(one - other).mean() <= 0.05 * other.std()
