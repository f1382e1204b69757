"""Rows and weights in fp8: their values are the reference's, and their matmul is that of the dequantized numbers."""

from __future__ import annotations

import os
from dataclasses import replace
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
from headway.kernels.reference.norm import rms_norm  # noqa: E402
from headway.kernels.reference.quantized import e4m3_rows  # noqa: E402
from headway.kernels.triton.fp8 import scaled_matmul, scaled_rows  # noqa: E402
from headway.kernels.triton.fp8.scaled_matmul import INNER, ScaledMatrix, ScaledTile  # noqa: E402
from headway.kernels.triton.fp8.scaled_rows import ScaledRows, Unscaled  # noqa: E402
from headway.kernels.triton.quantized_tiles import SplitSums  # noqa: E402
from headway.models.quantized.cuda import quantize_decoder  # noqa: E402
from headway.models.quantized.reference import float_decoder  # noqa: E402
from headway.testing import random_model  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SLOWER = () if DEVICE == "cuda" else pytest.mark.slow  # in the interpreter
LIMIT = 2e-4 if DEVICE == "cuda" else 3e-6  # tensor cores keep about 14 bits of a sum of fp8
HALF = 5e-4  # what comes out in float16 has eleven bits


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scaled(x: torch.Tensor) -> ScaledRows:
    rows = ScaledRows.empty(len(x), x.shape[1], x.device)
    scaled_rows.quantize(x, rows)
    return rows


def floats(rows: ScaledRows, inputs: int) -> torch.Tensor:
    return (rows.quants.float() * rows.scales[:, None])[:, :inputs]


def unscaled(rows: int, n: int) -> Unscaled:
    """Sums as cuBLAS leaves them, with scales and a bias."""
    return Unscaled(draw(rows, n, seed=3).bfloat16(), draw(rows, seed=4).abs(), draw(n, seed=5).abs(), None)


def floats_of(x: Unscaled) -> torch.Tensor:
    return x.sums.float() * x.rows[:, None] * x.outputs


def matrix(n: int, k: int, *, gated: bool = False) -> ScaledMatrix:
    return scaled_matmul.quantize(draw(n, k, seed=1) / k**0.5, draw(n, seed=2), gated=gated)


def near(found: torch.Tensor, expected: torch.Tensor, limit: float = LIMIT) -> None:
    assert float((found - expected).norm()) <= limit * float(expected.norm())


# -- rows ----------------------------------------------------------------------------------------------------------


def test_every_number_goes_to_the_nearest_of_fp8() -> None:
    """All e4m3 numbers, all that lie in the middle of two, and those just beside them, in a row whose scale is 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(far)) for far in (0.0, 500.0)]
    numbers = torch.cat([codes, middles, *beside]).to(DEVICE)
    x = torch.stack([numbers, -numbers])
    expected, scales = e4m3_rows(x)
    assert bool((scales == 1).all())
    found = scaled(x)
    assert torch.equal(found.scales, scales[:, 0])
    assert torch.equal(found.quants.view(torch.uint8)[:, : x.shape[1]], expected.view(torch.uint8))
    assert not found.quants.view(torch.uint8)[:, x.shape[1] :].any()


def test_long_rows_are_quantized_by_many_programs() -> None:
    x = draw(2, scaled_rows.LONG + 96)
    expected, scales = e4m3_rows(x)
    found = scaled(x)
    assert torch.equal(found.scales, scales[:, 0])
    assert torch.equal(found.quants.view(torch.uint8)[:, : x.shape[1]], expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_have_a_scale_of_their_own(dtype: torch.dtype) -> None:
    x = (draw(5, 96) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 1e-32], device=DEVICE)[:, None]).to(dtype)
    expected, scales = e4m3_rows(x)
    found = scaled(x)
    assert torch.equal(found.scales, scales[:, 0])
    assert torch.equal(found.quants.view(torch.uint8)[:, :96], expected.view(torch.uint8))
    for i in range(len(x)):
        assert torch.equal(scaled(x[i : i + 1]).quants.view(torch.uint8)[0], found.quants.view(torch.uint8)[i])


def test_what_is_not_finite_makes_its_row_nan() -> None:
    x = draw(4, 128)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    y = torch.empty(4, 32, device=DEVICE)
    scaled_matmul.matmul(scaled(x), matrix(32, 128), y, ScaledTile(16, 64, 128))
    assert [bool(row.isnan().all()) for row in y] == [False, True, True, False]


def test_norms_are_quantized_from_floats() -> None:
    x, weight, delta = draw(3, 96), draw(96, seed=1), unscaled(3, 96)
    after = x + floats_of(delta)
    rows, kept = ScaledRows.empty(3, 96, x.device), torch.empty(3, 96, device=DEVICE)
    scaled_rows.norm(x, weight, 1e-5, rows, add=delta, floats=kept)
    near(x, after)
    near(kept, rms_norm(after, weight, 1e-5), 1e-6)
    expected, scales = e4m3_rows(kept)
    assert torch.equal(rows.scales, scales[:, 0])
    assert torch.equal(rows.quants.view(torch.uint8)[:, :96], expected.view(torch.uint8))


@pytest.mark.parametrize("biased", [False, True])
def test_gate_times_up_is_quantized_from_floats(biased: bool) -> None:
    bias = draw(3, 80, seed=2) if biased else None
    mixed, own = draw(3, 80, seed=1), draw(80, seed=7)
    gate, up = mixed.unflatten(1, (5, 2, 8)).unbind(2)
    added = own if bias is None else bias
    rows, kept = ScaledRows.empty(3, 40, own.device), torch.empty(3, 40, device=DEVICE)
    scaled_rows.gated(mixed, rows, size=40, bias=added, floats=kept)
    near(kept, gated_silu(torch.cat([gate.flatten(1), up.flatten(1)], 1) + added, exact=False), 1e-6)
    expected, scales = e4m3_rows(kept)
    assert torch.equal(rows.scales, scales[:, 0])
    assert torch.equal(rows.quants.view(torch.uint8)[:, :40], expected.view(torch.uint8))


def test_scales_are_applied_later() -> None:
    sums, bias = unscaled(3, 96), draw(96)
    y, onto = torch.empty(3, 96, device=DEVICE), torch.ones(3, 96, device=DEVICE)
    scaled_rows.apply_scales(sums, y)
    scaled_rows.apply_scales(replace(sums, bias=bias), onto, add=True)
    near(y, floats_of(sums), 1e-6)
    near(onto, 1 + floats_of(sums) + bias, 1e-6)


# -- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k", "gated"), [(16, 64, False), (21, 96, False), (50, 160, False), (42, 96, True)])
def test_weights_are_the_nearest_to_what_they_were(n: int, k: int, gated: bool) -> None:
    weight = draw(n, k)
    found = scaled_matmul.quantize(weight, gated=gated).weight
    quants, scales = e4m3_rows(weight)
    assert torch.equal(found, quants.float() * scales)


def test_weights_of_many_slices_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(100, 96)
    whole = scaled_matmul.quantize(weight, gated=True)
    monkeypatch.setattr(scaled_matmul, "SLICE", 16 * 96)
    sliced = scaled_matmul.quantize(weight, gated=True)
    assert torch.equal(whole.quants.view(torch.uint8), sliced.quants.view(torch.uint8))
    assert torch.equal(whole.scales, sliced.scales)


def test_inputs_that_fill_no_group_are_refused() -> None:
    with pytest.raises(Unsupported, match="33"):
        scaled_matmul.quantize(draw(4, 33))


# -- matmul --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tile", [ScaledTile(16, 64, 128), ScaledTile(32, 64, 64), ScaledTile(16, 64, 128, splits=2), scaled_matmul.FIXED]
)
def test_every_tile_gives_the_same(tile: ScaledTile) -> None:
    for rows, n, k, gated in ((1, 48, 352, False), (19, 21, 96, False), (40, 84, 256, True)):
        x, w = scaled(draw(rows, k)), matrix(n, k, gated=gated)
        product = F.linear(floats(x, k), w.weight, w.bias)
        expected = gated_silu(product, exact=False) if gated else product
        sums = SplitSums.of(128, 64, w.scales.device, tile.splits)
        y, onto = (torch.ones(rows, expected.shape[1], device=DEVICE) for _ in range(2))
        for _ in range(2):  # what has arrived is forgotten
            scaled_matmul.matmul(x, w, y, tile, sums=sums)
            near(y, expected)
        scaled_matmul.matmul(x, w, onto, tile, sums=sums, add=True, factor=1.0 if gated else 16.0)
        assert w.bias is not None
        near(onto, 1 + (expected if gated else w.bias + 16 * (product - w.bias)))
        if gated:
            own, half = draw(rows, n, seed=3), torch.empty(rows, n // 2, dtype=torch.float16, device=DEVICE)
            scaled_matmul.matmul(x, w, y, tile, sums=sums, row_bias=own)
            near(y, gated_silu(F.linear(floats(x, k), w.weight) + own, exact=False))
            scaled_matmul.matmul(x, w, half, tile, sums=sums)
            near(half.float() / INNER, expected, HALF)


def test_a_row_is_the_same_alone_and_among_others() -> None:
    x, w = draw(40, 352), matrix(24, 352)
    among = torch.empty(40, 24, device=DEVICE)
    scaled_matmul.matmul(scaled(x), w, among, scaled_matmul.FIXED)
    for some in (slice(0, 1), slice(39, 40), slice(5, 17)):
        alone = torch.empty(some.stop - some.start, 24, device=DEVICE)
        scaled_matmul.matmul(scaled(x[some]), w, alone, scaled_matmul.FIXED)
        assert torch.equal(alone, among[some])


@pytest.mark.skipif(DEVICE == "cpu", reason="a kernel for one row is written in PTX")
def test_one_row_alone() -> None:
    for n, k, gated in ((20, 96, False), (48, 2048, False), (42, 576, True), (32, 4096, False), (96, 14336, False)):
        x, w = scaled(draw(1, k)), matrix(n, k, gated=gated)
        product = F.linear(floats(x, k), w.weight, w.bias)
        y = torch.ones(1, n // 2 if gated else n, device=DEVICE)
        scaled_matmul.matvec(x, w, y, add=True)
        near(y - 1, gated_silu(product, exact=False) if gated else product, 1e-5)


# -- whole models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", pytest.param("llama", marks=SLOWER)])
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=SLOWER)])
def test_an_engine_computes_what_its_reference_does(
    family: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt and decode against torch in float32 over dequantized weights, with rows in fp8."""
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "vocab_size": 40,
    }
    decoder = quantize_decoder(random_model(family, device=DEVICE, **sizes), "fp8")
    tokens = [3, 1, 4, 1, 5]

    async def logits(engine: hw.Engine) -> np.ndarray:
        async with engine.context() as context:
            rows = []
            for some in (tokens[:4], tokens[4:]):
                forward = context.forward().input(some)
                handle = forward.probe(-1, hw.Logits())
                rows.append((await forward.execute()).logits(handle))
            return np.stack(rows)

    with hw.Engine(decoder, pages=16, deterministic=deterministic) as engine:
        assert engine.info.runner == "triton"
        assert engine.info.format == "fp8, int8"
        found = engine.run(logits)
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with hw.Engine(float_decoder(decoder), pages=16, device="cpu") as engine:
        expected = engine.run(logits)
    # Numbers that lie in the middle of two of fp8 may go either way.
    assert np.abs(found - expected).max() <= 2e-2 * np.abs(expected).max()
