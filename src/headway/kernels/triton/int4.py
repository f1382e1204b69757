"""Matrices of 4-bit codes, and their product with one row.

A weight is scale × (code - 8), the scale in float16, one for a group of 32 inputs. Activations stay floats: a row comes
in float16, and sums of eight products leave it at once.

Codes lie eight to a word of int32, inputs 2j and 2j + 1 of the eight at bits 4j and 16 + 4j: the bits of two neighbours
under one mask, joined with the exponent of 1024, are two float16 numbers, 1024 + code each. So a product unpacks two
weights with one instruction and multiplies two with another.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false
# ruff: noqa: PLR0917
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headway.base.errors import Unsupported
from headway.kernels.triton.launch import follow, options, wait

GROUP = 32
INNER = 0.0625  # what goes into float16 is divided by 16: there is room for large values between gate and down
PLACES = (0, 16, 4, 20, 8, 24, 12, 28)  # where the code of each of eight inputs begins in its word


@dataclass(frozen=True, eq=False)
class Int4:
    """A matrix [N, K] and its bias [N] or none: codes [N, K / 8] int32, scales [N, K / 32] float16."""

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
    """The nearest of 16 steps around 0, the first of which is the value farthest from it, in each group of 32."""
    n, k = weight.shape
    if k % GROUP:
        raise Unsupported(f"int4 takes groups of {GROUP} inputs and this matrix has {k}; leave quantize out")
    grouped = weight.float().view(n, -1, GROUP)
    far = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    scale = (far / -8).half()  # [N, K / 32, 1]
    step = torch.where(scale != 0, scale.float(), 1)
    codes = (torch.round(grouped / step) + 8).clamp(0, 15).to(torch.int32)
    words = codes.view(n, k // 8, 8)
    packed = torch.zeros(n, k // 8, dtype=torch.int32, device=weight.device)
    for i, place in enumerate(PLACES):
        packed |= words[..., i] << place
    return Int4(packed, scale.squeeze(2).contiguous(), bias, weight.dtype)


def dequantise(w: Int4) -> Tensor:
    """The weights [N, K] in the dtype they had."""
    n, words = w.codes.shape
    places = torch.tensor(PLACES, device=w.codes.device, dtype=torch.int32)
    codes = ((w.codes[..., None] >> places) & 15).view(n, -1, GROUP)
    return ((codes - 8) * w.scales.float()[..., None]).view(n, 8 * words).to(w.dtype)


def row_product(
    x: Tensor,
    w: Int4,
    y: Tensor,
    *,
    gated: bool = False,
    add: bool = False,
    factor: float = 1.0,
    ahead: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """factor × x [K] float16 times the matrix into y [N], or onto it with `add`; silu(gate) × up with `gated`.

    What goes into float16 (y, where it is) is INNER times itself. `tile` is outputs and groups of a program, and warps.
    """
    n, groups = y.shape[-1], w.scales.shape[1]
    outputs, part, warps = tile or pick_tile(groups, gated)
    assert x.dtype == torch.float16
    _row_product[(triton.cdiv(n, outputs),)](
        x.view(torch.int32) if x.is_cuda else x, w.codes, w.scales, y, x if w.bias is None else w.bias, n,
        FACTOR=factor, GROUPS=groups, BIAS=w.bias is not None, GATED=gated, ADD=add, BN=outputs, BG=part,
        SCALE=INNER if y.dtype == torch.float16 else 1.0, EVEN=n % outputs == 0 and groups % part == 0,
        PACKED=x.is_cuda, AHEAD=ahead, num_warps=warps, **options(ahead),
    )  # fmt: skip


def pick_tile(groups: int, gated: bool) -> tuple[int, int, int]:
    """Outputs and groups of a program, and its warps."""
    return 4 if gated else 8, min(64, triton.next_power_of_2(groups)), 4


@triton.jit
def _eight(w, x0, x1, x2, x3):
    """The sum of eight weights, in steps, times their inputs, which come in pairs."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 h, k, m, p, q, s, t;
        .reg .f16 a, b;
        .reg .f32 c, d;
        mov.b32 k, 0x64006400;
        mov.b32 m, 0x64086408;
        mov.b32 p, 0x2c002c00;
        mov.b32 q, 0xd480d480;
        shr.u32 t, $1, 8;
        lop3.b32 h, $1, 0x000f000f, k, 0xea;
        sub.rn.f16x2 h, h, m;
        mul.rn.f16x2 s, h, $2;
        lop3.b32 h, $1, 0x00f000f0, k, 0xea;
        fma.rn.f16x2 h, h, p, q;
        fma.rn.f16x2 s, h, $3, s;
        lop3.b32 h, t, 0x000f000f, k, 0xea;
        sub.rn.f16x2 h, h, m;
        fma.rn.f16x2 s, h, $4, s;
        lop3.b32 h, t, 0x00f000f0, k, 0xea;
        fma.rn.f16x2 h, h, p, q;
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
def _words(codes, row, g, i, inside, EVEN: tl.constexpr):
    """Words of rows and groups: [BN, BG, 4]."""
    at = codes + (row + g) * 4 + i
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=inside & (i < 4), other=0, eviction_policy="evict_first")


@triton.jit
def _sums(
    w, x, scales, row, g, i, inside, BN: tl.constexpr, BG: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr
):
    """Each word's weights times their inputs: [BN, BG, 4].

    Inputs and scales are read in the shape of the words, the same ones by many threads: so no thread waits for another.
    """
    shape: tl.constexpr = (BN, BG, 4)
    there = tl.broadcast_to(inside, shape)
    if EVEN:
        scale = tl.load(scales + tl.broadcast_to(row + g, shape)).to(tl.float32)
    else:
        scale = tl.load(scales + tl.broadcast_to(row + g, shape), mask=there, other=0.0).to(tl.float32)
    if PACKED:
        at = x + tl.broadcast_to(g * 16 + i * 4, shape)
        if EVEN:
            x0, x1, x2, x3 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        else:
            x0, x1 = tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0)
            x2, x3 = tl.load(at + 2, mask=there, other=0), tl.load(at + 3, mask=there, other=0)
        return _eight(w, x0, x1, x2, x3) * scale
    total = tl.zeros(shape, tl.float32)
    at = x + tl.broadcast_to(g * 32 + i * 8, shape)
    for j in tl.static_range(4):
        low = tl.load(at + 2 * j, mask=there, other=0.0).to(tl.float32)
        high = tl.load(at + 2 * j + 1, mask=there, other=0.0).to(tl.float32)
        total += (((w >> (4 * j)) & 15) - 8).to(tl.float32) * low + (((w >> (16 + 4 * j)) & 15) - 8).to(
            tl.float32
        ) * high
    return total * scale


@triton.jit
def _row_product(
    x, codes, scales, y, bias, n,
    FACTOR: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BN: tl.constexpr, BG: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    follow(AHEAD)
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    row, above = r.to(tl.int64)[:, None, None] * GROUPS, (r + n).to(tl.int64)[:, None, None] * GROUPS
    g, i = tl.arange(0, BG)[None, :, None], tl.arange(0, 4)[None, None, :]
    real = (r < n)[:, None, None]
    total = tl.zeros((BN, BG, 4), tl.float32)
    up = tl.zeros((BN, BG, 4), tl.float32)
    w = _words(codes, row, g, i, real & (g < GROUPS), EVEN)
    if GATED:
        u = _words(codes, above, g, i, real & (g < GROUPS), EVEN)
    wait(AHEAD)
    for base in range(0, GROUPS, BG):
        now = w
        if GATED:
            beside = u
        if base + BG < GROUPS:
            w = _words(codes, row, base + BG + g, i, real & (base + BG + g < GROUPS), EVEN)
            if GATED:
                u = _words(codes, above, base + BG + g, i, real & (base + BG + g < GROUPS), EVEN)
        inside = real & (base + g < GROUPS)
        total += _sums(now, x, scales, row, base + g, i, inside, BN, BG, EVEN, PACKED)
        if GATED:
            up += _sums(beside, x, scales, above, base + g, i, inside, BN, BG, EVEN, PACKED)
    result = tl.sum(tl.sum(total, 2), 1) * FACTOR
    if BIAS:
        result += tl.load(bias + r, mask=r < n, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(tl.sum(up, 2), 1) * FACTOR
        if BIAS:
            other += tl.load(bias + n + r, mask=r < n, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * other
    if ADD:
        result += tl.load(y + r, mask=r < n, other=0.0).to(tl.float32)
    tl.store(y + r, (result * SCALE).to(y.dtype.element_ty), mask=r < n)
