"""Matrices of 4-bit codes, and their product with one row at the speed of memory.

A weight is scale × code + least, for groups of 32 inputs, scale and least in float16: what `packed.quantise_int4` makes
for a CPU. Activations stay floats.

Codes lie eight to a word of int32, inputs 2j and 2j + 1 of the eight at bits 4j and 16 + 4j: the bits of two neighbours
under one mask, joined with the exponent of 1024, are two float16 numbers, 1024 + code each. So a product unpacks two
weights with one instruction and multiplies two with another. A row is divided by its largest value first, so that
float16 holds it; sums of eight products leave float16 at once.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false
# ruff: noqa: PLR0915, PLR0917
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headway.base.errors import Unsupported
from headway.kernels.triton.launch import follow, options, wait
from headway.kernels.triton.products import Norm

GROUP = 32
PLACES = (0, 16, 4, 20, 8, 24, 12, 28)  # where the code of each of eight inputs begins in its word


@dataclass(frozen=True, eq=False)
class Int4:
    """A matrix [N, K] and its bias [N] or none: codes [N, K / 8] int32; scale and least [N, K / 32, 2] float16."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def label(self) -> str:
        """The format in a word, as for packed matrices."""
        return f"int4 in groups of {GROUP}"

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def weight(self) -> Tensor:
        """The matrix as floats."""
        return dequantise(self)

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, K] times the matrix → [R, N], through floats."""
        return F.linear(x, self.weight, self.bias)


def quantise(weight: Tensor, bias: Tensor | None = None) -> Int4:
    """The nearest of 16 steps between the least and the largest of each group of 32 weights."""
    n, k = weight.shape
    if k % GROUP:
        raise Unsupported(f"int4 takes groups of {GROUP} inputs and this matrix has {k}; leave quantize out")
    grouped = weight.float().view(n, -1, GROUP)
    least = grouped.amin(2).half()
    scale = ((grouped.amax(2) - least.float()) / 15).half()
    step = torch.where(scale > 0, scale.float(), 1)[..., None]
    codes = torch.round((grouped - least.float()[..., None]) / step).clamp(0, 15).to(torch.int32)
    words = codes.view(n, k // 8, 8)
    packed = torch.zeros(n, k // 8, dtype=torch.int32, device=weight.device)
    for i, place in enumerate(PLACES):
        packed |= words[..., i] << place
    return Int4(packed, torch.stack([scale, least], 2).contiguous(), bias, weight.dtype)


def dequantise(w: Int4) -> Tensor:
    """The weights [N, K] in the dtype they had."""
    n, words = w.codes.shape
    places = torch.tensor(PLACES, device=w.codes.device, dtype=torch.int32)
    codes = ((w.codes[..., None] >> places) & 15).view(n, -1, GROUP)
    scale, least = w.scales.float().unbind(2)
    return (codes * scale[..., None] + least[..., None]).view(n, 8 * words).to(w.dtype)


def row_product(
    x: Tensor,
    w: Int4,
    y: Tensor,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    add: bool = False,
    ahead: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """x [K] times the matrix into y [N], or onto it with `add`; `norm`, `gated` and `ahead` as for float matrices.

    `tile` is outputs and groups of a program, and its warps.
    """
    n, groups = y.shape[-1], w.scales.shape[1]
    outputs, part, warps = tile or pick_tile(groups, gated)
    _row_product[(triton.cdiv(n, outputs),)](
        x, w.codes, w.scales.view(torch.int32), y, x if w.bias is None else w.bias, x if norm is None else norm.weight,
        0.0 if norm is None else norm.eps, n, GROUPS=groups, WIDE=triton.next_power_of_2(groups * 32),
        BIAS=w.bias is not None, NORM=norm is not None, GATED=gated, ADD=add, BN=outputs, BG=part,
        EVEN=n % outputs == 0 and groups % part == 0, PACKED=x.is_cuda, AHEAD=ahead, num_warps=warps, **options(ahead),
    )  # fmt: skip


def pick_tile(groups: int, gated: bool) -> tuple[int, int, int]:
    """Outputs and groups of a program, and its warps."""
    return 4 if gated else 8, min(64, triton.next_power_of_2(groups)), 4


@triton.jit
def _pair(low, high):
    """Two float32 as two float16 in one int32."""
    return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)


@triton.jit
def _eight(w, x0, x1, x2, x3):
    """The sum of eight codes times their inputs, which come as pairs; x1 and x3 are sixteenths."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 h, k, s, t;
        .reg .f16 a, b;
        .reg .f32 c, d;
        mov.b32 k, 0x64006400;
        lop3.b32 h, $1, 0x000f000f, k, 0xea;
        sub.rn.f16x2 h, h, k;
        mul.rn.f16x2 s, h, $2;
        lop3.b32 h, $1, 0x00f000f0, k, 0xea;
        sub.rn.f16x2 h, h, k;
        fma.rn.f16x2 s, h, $3, s;
        shr.u32 t, $1, 8;
        lop3.b32 h, t, 0x000f000f, k, 0xea;
        sub.rn.f16x2 h, h, k;
        fma.rn.f16x2 s, h, $4, s;
        lop3.b32 h, t, 0x00f000f0, k, 0xea;
        sub.rn.f16x2 h, h, k;
        fma.rn.f16x2 s, h, $5, s;
        mov.b32 {a, b}, s;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        add.f32 $0, c, d;
        }
        """,
        "=f,r,r,r,r,r",
        [w, x0, x1, x2, x3],
        tl.float32,
        True,
        1,
    )


@triton.jit
def _inputs(x, norm, at, inside, scale, NORM: tl.constexpr):
    """Inputs in float32, through the norm's weight, divided by the row's largest."""
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        v = v * tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    return v * scale


@triton.jit
def _coded(codes, r, g, n, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Words of rows r and groups g: [BN, BG, 4]."""
    i = tl.arange(0, 4)
    at = codes + (r.to(tl.int64)[:, None, None] * GROUPS + g[None, :, None]) * 4 + i[None, None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    inside = (r < n)[:, None, None] & (g < GROUPS)[None, :, None] & (i < 4)[None, None, :]
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _scaled(scales, r, g, n, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Scale and least of rows r and groups g, [BN, BG] each."""
    at = scales + r.to(tl.int64)[:, None] * GROUPS + g[None, :]
    if EVEN:
        both = tl.load(at, eviction_policy="evict_first")
    else:
        both = tl.load(at, mask=(r < n)[:, None] & (g < GROUPS)[None, :], other=0, eviction_policy="evict_first")
    scale = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    least = ((both >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, least


@triton.jit
def _unpacked(w, x, norm, first, inside, scale, NORM: tl.constexpr):
    """As `_eight`, from inputs `first` on, in plain float32."""
    total = tl.zeros(w.shape, tl.float32)
    for j in tl.static_range(4):
        a = _inputs(x, norm, first + 2 * j, inside, scale, NORM)
        b = _inputs(x, norm, first + 2 * j + 1, inside, scale, NORM)
        total += ((w >> (4 * j)) & 15).to(tl.float32) * a[None, :, :]
        total += ((w >> (16 + 4 * j)) & 15).to(tl.float32) * b[None, :, :]
    return total


@triton.jit
def _row_product(
    x, codes, scales, y, bias, norm, eps, n,
    GROUPS: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    follow(AHEAD)
    r, i = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 4)
    total = tl.zeros((BN, BG), tl.float32)
    up = tl.zeros((BN, BG), tl.float32)
    w = _coded(codes, r, tl.arange(0, BG), n, GROUPS, EVEN)
    if GATED:
        u = _coded(codes, r + n, tl.arange(0, BG), 2 * n, GROUPS, EVEN)
    wait(AHEAD)
    every = tl.arange(0, WIDE)
    row = tl.load(x + every, mask=every < 32 * GROUPS, other=0.0).to(tl.float32)
    size = 1.0
    if NORM:
        size = tl.rsqrt(tl.sum(row * row, 0) / (32 * GROUPS) + eps)
        row = row * tl.load(norm + every, mask=every < 32 * GROUPS, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(row), 0)
    most = tl.where(most > 0, most, 1.0)
    for base in range(0, GROUPS, BG):
        g = base + tl.arange(0, BG)
        inside = (g < GROUPS)[:, None] & (i < 4)[None, :]
        first = g[:, None] * 32 + i[None, :] * 8
        whole = tl.zeros((BG, 4), tl.float32)
        if PACKED:
            a = _inputs(x, norm, first, inside, 1.0 / most, NORM)
            b = _inputs(x, norm, first + 1, inside, 1.0 / most, NORM)
            whole += a + b
            x0 = _pair(a, b)
            a = _inputs(x, norm, first + 2, inside, 1.0 / most, NORM)
            b = _inputs(x, norm, first + 3, inside, 1.0 / most, NORM)
            whole += a + b
            x1 = _pair(a * 0.0625, b * 0.0625)
            a = _inputs(x, norm, first + 4, inside, 1.0 / most, NORM)
            b = _inputs(x, norm, first + 5, inside, 1.0 / most, NORM)
            whole += a + b
            x2 = _pair(a, b)
            a = _inputs(x, norm, first + 6, inside, 1.0 / most, NORM)
            b = _inputs(x, norm, first + 7, inside, 1.0 / most, NORM)
            whole += a + b
            x3 = _pair(a * 0.0625, b * 0.0625)
            parts = _eight(w, x0[None, :, :], x1[None, :, :], x2[None, :, :], x3[None, :, :])
            if GATED:
                others = _eight(u, x0[None, :, :], x1[None, :, :], x2[None, :, :], x3[None, :, :])
        else:
            for j in tl.static_range(8):
                whole += _inputs(x, norm, first + j, inside, 1.0 / most, NORM)
            parts = _unpacked(w, x, norm, first, inside, 1.0 / most, NORM)
            if GATED:
                others = _unpacked(u, x, norm, first, inside, 1.0 / most, NORM)
        if base + BG < GROUPS:
            w = _coded(codes, r, g + BG, n, GROUPS, EVEN)
            if GATED:
                u = _coded(codes, r + n, g + BG, 2 * n, GROUPS, EVEN)
        inputs = tl.sum(whole, 1)[None, :]
        scale, least = _scaled(scales, r, g, n, GROUPS, EVEN)
        total += tl.sum(parts, 2) * scale + least * inputs
        if GATED:
            scale, least = _scaled(scales, r + n, g, 2 * n, GROUPS, EVEN)
            up += tl.sum(others, 2) * scale + least * inputs
    result = tl.sum(total, 1) * (most * size)
    if BIAS:
        result += tl.load(bias + r, mask=r < n, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(up, 1) * (most * size)
        if BIAS:
            other += tl.load(bias + n + r, mask=r < n, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * other
    if ADD:
        result += tl.load(y + r, mask=r < n, other=0.0).to(tl.float32)
    tl.store(y + r, result.to(y.dtype.element_ty), mask=r < n)
