"""Activations in fp8 (e4m3) with a scale for each row: quantized as they are normed, gated, or as they are.

A row's scale is its largest magnitude / 448; its numbers times 448 / that magnitude are rounded to the nearest, ties to
even (`kernels.reference.quantized.e4m3_rows`). They are stored in rows of whole blocks of INPUTS, with zeros behind.

What cuBLAS makes of such rows and weights in fp8 is without their scales (`Unscaled`): whatever reads it applies them.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.launch import launch_next, options, wait

INPUTS = 128  # numbers of a row come in blocks of so many
E4M3 = torch.float8_e4m3fn
LONG, PARTS, FEW = 8192, 8, 64  # of at most FEW rows longer than LONG each is quantized by PARTS programs


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """Quantized rows: e4m3 numbers [R, K] and scales [R] float32. K is a multiple of INPUTS."""

    quants: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.scales)

    @classmethod
    def empty(cls, rows: int, inputs: int, device: torch.device) -> ScaledRows:
        quants = torch.empty(rows, padded_inputs(inputs), dtype=E4M3, device=device)
        return cls(quants, torch.empty(rows, dtype=torch.float32, device=device))

    def first(self, rows: int) -> ScaledRows:
        """The first rows."""
        return ScaledRows(self.quants[:rows], self.scales[:rows])


@dataclass(frozen=True, eq=False)
class Unscaled:
    """A matmul's sums [R, N], to be multiplied with the scales of rows [R] and outputs [N or more]; then `bias` [N] is
    added."""

    sums: Tensor
    rows: Tensor
    outputs: Tensor
    bias: Tensor | None = None


def padded_inputs(inputs: int) -> int:
    """The numbers of a stored row of so many inputs."""
    return -(-inputs // INPUTS) * INPUTS


def norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: ScaledRows,
    *,
    add: Unscaled | None = None,
    floats: Tensor | None = None,
    ahead: bool = False,
) -> None:
    """The root-mean-square norm of x [R, E] times weight, quantized; also as `floats` [R, E] where somebody reads them.

    What `add` stands for is first added to x in place.
    """
    e, wide = x.shape[1], _wide(out.quants.shape[1])
    more = Unscaled(x, out.scales, out.scales) if add is None else add
    _norm[(len(x),)](
        x, more.sums, more.rows, more.outputs, out.scales if more.bias is None else more.bias, weight,
        out.quants.view(torch.uint8), out.scales, x if floats is None else floats, eps,
        ADD=add is not None, BIAS=more.bias is not None, FLOATS=floats is not None, E=e, STORED=out.quants.shape[1],
        WIDE=wide, PACKED=x.is_cuda, AHEAD=ahead, num_warps=_warps(wide), **options(ahead),
    )  # fmt: skip


def quantize(x: Tensor, out: ScaledRows, *, ahead: bool = False) -> None:
    """Rows x [R, K], quantized."""
    stored = out.quants.shape[1]
    wide, parts = _wide(stored), PARTS if stored > LONG and len(x) <= FEW else 1
    _quantize[(len(x), parts)](
        x, out.quants.view(torch.uint8), out.scales, K=x.shape[1], STORED=stored, WIDE=wide, PART=wide // parts,
        PACKED=x.is_cuda, AHEAD=ahead, num_warps=_warps(wide), **options(ahead),
    )  # fmt: skip


def gated(
    gate_up: Tensor,
    out: ScaledRows,
    *,
    size: int,
    bias: Tensor | None = None,
    floats: Tensor | None = None,
    ahead: bool = False,
) -> None:
    """silu(gate) × up, quantized, of rows in which eight gates and their ups alternate, [R, 2 × `size`] or more.

    A `bias` [2 × size], or one for each row [R, 2 × size], gates before ups, is first added. `floats` [R, size] get the
    same in floats.
    """
    wide = _wide(out.quants.shape[1])
    _gated[(len(gate_up),)](
        gate_up, gate_up if bias is None else bias, out.quants.view(torch.uint8), out.scales,
        gate_up if floats is None else floats, gate_up.stride(0),
        BIAS=bias is not None, BY_ROW=bias is not None and bias.ndim == 2, FLOATS=floats is not None, F=size,
        STORED=out.quants.shape[1], WIDE=wide, PACKED=out.scales.is_cuda, AHEAD=ahead,
        num_warps=_warps(wide), **options(ahead),
    )  # fmt: skip


def apply_scales(x: Unscaled, y: Tensor, *, add: bool = False, ahead: bool = False) -> None:
    """What `x` stands for into y [R, N], or added to it."""
    n, block = y.shape[1], 1024
    _apply[(len(y), triton.cdiv(n, block))](
        x.sums, x.rows, x.outputs, x.outputs if x.bias is None else x.bias, y, n, x.sums.stride(0),
        BIAS=x.bias is not None, ADD=add, BLOCK=block, AHEAD=ahead, num_warps=4, **options(ahead),
    )  # fmt: skip


def _wide(n: int) -> int:
    return max(INPUTS, triton.next_power_of_2(n))


def _warps(wide: int) -> int:
    return min(16, max(1, wide // 512))


@triton.jit
def _e4m3(v, PACKED: tl.constexpr):
    """The e4m3 bytes nearest to numbers of at most 448 in magnitude, ties to even.

    In the interpreter by hand: the exponent's bias is 7 instead of 127, and 20 bits less are kept; numbers below 2**-6
    are multiples of 2**-9.
    """
    if PACKED:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        small = (tl.abs(v) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
        code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 126)
        return (code | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def _factor(v, scales, row):
    """Stores the scale of a row v and gives what to multiply it with. What is not finite makes the scale NaN."""
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    large = most >= 1e-30  # SMALLEST_ROW: else the row is zeros
    scale = tl.where(large, tl.div_rn(most, 448.0), 0.0)
    tl.store(scales + row, tl.where(most.to(tl.int32, bitcast=True) < 0x7F800000, scale, float("nan")))
    return tl.where(large, tl.div_rn(448.0, tl.where(large, most, 1.0)), 0.0)


@triton.jit
def _store(v, quants, scales, row, i, STORED: tl.constexpr, PACKED: tl.constexpr):
    """Quantizes a row v and stores it; numbers beyond its end are zeros."""
    factor = _factor(v, scales, row)
    tl.store(quants + row * STORED + i, _e4m3(v * factor, PACKED), mask=i < STORED)


@triton.jit
def _norm(
    x, sums, row_scales, output_scales, bias, weight, quants, scales, floats, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, FLOATS: tl.constexpr, E: tl.constexpr, STORED: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    w = tl.load(weight + i, mask=i < E, other=0.0).to(tl.float32)
    wait(AHEAD)
    v = tl.load(x + row * E + i, mask=i < E, other=0.0)
    if ADD:
        more = tl.load(sums + row * E + i, mask=i < E, other=0.0).to(tl.float32)
        more = more * tl.load(row_scales + row) * tl.load(output_scales + i, mask=i < E, other=0.0)
        if BIAS:
            more += tl.load(bias + i, mask=i < E, other=0.0).to(tl.float32)
        v = (v.to(tl.float32) + more).to(v.dtype)
        tl.store(x + row * E + i, v, mask=i < E)
    wide = v.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / E + eps) * w
    if FLOATS:
        tl.store(floats + row * E + i, wide.to(floats.dtype.element_ty), mask=i < E)
    _store(wide, quants, scales, row, i, STORED, PACKED)


@triton.jit
def _quantize(
    x, quants, scales, K: tl.constexpr, STORED: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr,
    PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Every program of a row finds its scale, and quantizes a part of it."""
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    v = tl.load(x + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    factor = _factor(v, scales, row)
    if PART < WIDE:
        i = tl.program_id(1) * PART + tl.arange(0, PART)
        v = tl.load(x + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    tl.store(quants + row * STORED + i, _e4m3(v * factor, PACKED), mask=i < STORED)


@triton.jit
def _gated(
    gate_up, bias, quants, scales, floats, stride,
    BIAS: tl.constexpr, BY_ROW: tl.constexpr, FLOATS: tl.constexpr, F: tl.constexpr, STORED: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    at = gate_up + row * stride + i // 8 * 16 + i % 8
    gate = tl.load(at, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(at + 8, mask=i < F, other=0.0).to(tl.float32)
    if BIAS:
        own = bias + row * 2 * F if BY_ROW else bias
        gate += tl.load(own + i, mask=i < F, other=0.0).to(tl.float32)
        up += tl.load(own + F + i, mask=i < F, other=0.0).to(tl.float32)
    v = gate / (1.0 + tl.exp(-gate)) * up
    if FLOATS:
        tl.store(floats + row * F + i, v.to(floats.dtype.element_ty), mask=i < F)
    _store(v, quants, scales, row, i, STORED, PACKED)


@triton.jit
def _apply(
    sums, row_scales, output_scales, bias, y, n, stride,
    BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(sums + row * stride + i, mask=i < n, other=0.0).to(tl.float32)
    v = v * tl.load(row_scales + row) * tl.load(output_scales + i, mask=i < n, other=0.0)
    if BIAS:
        v += tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(y + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y + row * n + i, v.to(y.dtype.element_ty), mask=i < n)
