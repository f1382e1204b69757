"""Quantized weights: values survive, quantizing errs within its step, and rows are quantized as the formats say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.base.errors import Unsupported
from headway.kernels.host.quantized import QuantizedMatrix
from headway.kernels.reference.ordered_matmul import linear_reference
from headway.kernels.reference.quantized import dequantize, quantize_rows
from support.arrays import interleave_floats, interleave_groups, interleave_int8, quantize_int4, quantize_int8
from support.properties import examples

sizes = st.one_of(st.integers(1, 80), st.sampled_from((16, 31, 32, 33, 64, 96, 160)))
seeds = st.integers(0, 1 << 30)
quick = settings(deadline=None, max_examples=40)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=generator(seed))


def spread(per_group: Tensor, group: int, k: int) -> np.ndarray:
    """One number for each group, as one for each input."""
    return np.repeat(per_group.double().numpy(), group, axis=1)[:, :k]


# -- what goes in comes out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(n=sizes, k=sizes, seed=seeds)
@quick
def test_floats_come_back_as_they_were(dtype: torch.dtype, n: int, k: int, seed: int) -> None:
    weight = randn(n, k, seed).to(dtype)
    w = interleave_floats(weight)
    assert torch.equal(dequantize(w), weight.float())
    assert w.nbytes == -(-n // 16) * 16 * k * dtype.itemsize
    assert w.row_quantization is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("has_min", [True, False])
@given(n=sizes, k=sizes, seed=seeds, half=st.booleans())
@settings(quick, max_examples=15)
def test_codes_and_scales_mean_what_they_say(
    *, bits: int, group: int, has_min: bool, n: int, k: int, seed: int, half: bool
) -> None:
    draw, count = generator(seed), -(-k // group)
    quants = torch.randint(0, 1 << bits, (n, k), generator=draw, dtype=torch.uint8)
    scale, floor = (
        torch.randn(n, count, generator=draw).to(torch.float16 if half else torch.float32) for _ in range(2)
    )
    zero = 0 if has_min else 1 << (bits - 1)
    w = interleave_groups(quants, scale, floor if has_min else None, bits=bits, group=group, zero=zero)
    exact = spread(scale, group, k) * (quants.double().numpy() - zero) + (spread(floor, group, k) if has_min else 0)
    np.testing.assert_allclose(dequantize(w).numpy(), exact, rtol=1e-6, atol=1e-4)
    assert (w.row_quantization, w.label) == ("groups", f"int{bits} in groups of {group}")
    assert w.quants.nbytes == -(-n // 16) * 16 * -(-k // 32) * 32 * bits // 8


@given(n=sizes, k=sizes, seed=seeds)
@quick
def test_int8_codes_come_back_times_the_scale_of_their_row(n: int, k: int, seed: int) -> None:
    quants = torch.randint(-128, 128, (n, k), generator=generator(seed), dtype=torch.int8)
    scale = torch.rand(n, generator=generator(seed + 1))
    w = interleave_int8(quants, scale)
    assert torch.equal(dequantize(w), scale[:, None] * quants)
    assert w.row_quantization == "groups"


def test_a_bias_is_kept_in_float32_and_added() -> None:
    weight, bias, x = randn(7, 40), randn(1, 7, 1)[0], randn(3, 40, 2)
    for w in (
        interleave_floats(weight, bias.half()),
        quantize_int8(weight, bias.half()),
        quantize_int4(weight, bias.half()),
    ):
        assert w.bias is not None
        assert w.bias.dtype == np.float32
        plain = linear_reference(x, QuantizedMatrix(**{**vars(w), "bias": None}))
        torch.testing.assert_close(linear_reference(x, w), plain + bias.half().float())


# -- quantizing ----------------------------------------------------------------------------------------------------


@given(n=sizes, k=sizes, seed=seeds, size=st.sampled_from((1e-30, 1e-3, 1.0, 1e4, 1e30)))
@quick
def test_int8_errs_by_half_a_step_of_its_row_at_most(n: int, k: int, seed: int, size: float) -> None:
    weight = randn(n, k, seed) * size
    weight[::3] = 0
    step = weight.abs().amax(1, keepdim=True) / 127
    error = (dequantize(quantize_int8(weight)) - weight).abs()
    assert (error <= step * 0.50001).all()
    assert (dequantize(quantize_int8(weight))[::3] == 0).all()


@given(n=sizes, k=sizes, seed=seeds, size=st.sampled_from((1e-2, 1.0, 1e3)), shift=st.sampled_from((0.0, 5.0, -5.0)))
@quick
def test_int4_errs_by_half_a_step_of_its_group_and_the_rounding_of_its_ends(
    *, n: int, k: int, seed: int, size: float, shift: float
) -> None:
    weight = (randn(n, k, seed) + shift) * size
    error = (dequantize(quantize_int4(weight)) - weight).abs().double().numpy()
    padded = torch.nn.functional.pad(weight, (0, -k % 32)).unflatten(1, (-1, 32))
    low, high = padded.amin(2), padded.amax(2)
    rounding = (low.abs() + high.abs() + (high - low)) * 2**-11 + 1e-6
    assert (error <= spread((high - low) / 15 * 0.5 + rounding, 32, k)).all()


def test_int4_of_constant_groups_is_their_value() -> None:
    weight = torch.tensor([0.0, 1.0, -2.5, 0.125])[:, None].expand(4, 64)
    assert torch.equal(dequantize(quantize_int4(weight)), weight)


def test_int4_refuses_what_its_float16_scales_cannot_hold() -> None:
    weight = randn(3, 40)
    weight[1, 35] = 1e5
    with pytest.raises(Unsupported, match=r"100000.*65504.*int8"):
        quantize_int4(weight)
    assert dequantize(quantize_int8(weight)).isfinite().all()


# -- rows ----------------------------------------------------------------------------------------------------------


def quantized_by_hand(row: np.ndarray) -> np.ndarray:
    """One group: the nearest of 255 steps, in float32 as the formats do it."""
    most = np.float32(np.abs(row).max())
    if not np.isfinite(row).all():
        return np.full(len(row), np.nan, np.float32)
    if most < 1e-36:
        return np.zeros(len(row), np.float32)
    return np.rint(row * (np.float32(127) / most)).astype(np.float32) * (most / np.float32(127))


odd = st.sampled_from((0.0, 1e-36, 9e-37, 1e-45, -1e-40, 3e38, float("inf"), float("-inf"), float("nan")))


@given(row=st.lists(st.one_of(st.floats(width=32), st.floats(-2, 2, width=32), odd), min_size=1, max_size=80))
@settings(quick, max_examples=examples(150))
def test_rows_are_quantized_group_by_group(row: list[float]) -> None:
    x = np.array(row, dtype=np.float32)
    groups = [quantized_by_hand(x[i : i + 32]) for i in range(0, len(x), 32)]
    np.testing.assert_array_equal(quantize_rows(torch.from_numpy(x[None]), "groups")[0].numpy(), np.concatenate(groups))
    assert quantize_rows(torch.from_numpy(x), None).data_ptr() == x.ctypes.data  # floats are taken as they are


def test_the_reference_is_the_matmul_of_quantized_rows_and_plain_weights() -> None:
    weight, x, bias = randn(21, 70), randn(5, 70, 1), randn(1, 21, 2)[0]
    for w in (interleave_floats(weight, bias), quantize_int8(weight, bias), quantize_int4(weight, bias)):
        exact = quantize_rows(x, w.row_quantization).double() @ dequantize(w).double().T + bias
        torch.testing.assert_close(linear_reference(x, w), exact.float(), rtol=1e-5, atol=1e-4)
