"""Matrices of 4-bit codes, and their product with one row.

A weight is scale × (code - 8), the scale in float16, one for a group of 32 inputs. Activations stay floats: a row comes
in float16, and sums of eight products leave it at once.

Codes lie eight to a word of int32, two neighbouring inputs at bits 4j and 16 + 4j: their bits under one mask, joined
with the exponent of 1024, are two float16 numbers, 1024 + code each. So a product unpacks two weights with one
instruction and multiplies two with another. Group g has the pairs g, g + G, g + 2G, … of a row of G groups, and its
four words lie G apart: whatever threads that work on neighbouring groups read lies side by side.
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
PAIRS = GROUP // 2


@dataclass(frozen=True, eq=False)
class Int4:
    """A matrix [N, K] and its bias [N] or none: codes [N, 4, G] int32, scales [N, G] float16; G is K / 32."""

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
    grouped = weight.float().view(n, PAIRS, -1, 2).permute(0, 2, 1, 3)  # [N, G, 16, 2]
    far = grouped.flatten(2).gather(2, grouped.flatten(2).abs().argmax(2, keepdim=True))
    scale = (far / -8).half()  # [N, G, 1]
    step = torch.where(scale != 0, scale.float(), 1)[..., None]
    codes = (torch.round(grouped / step) + 8).clamp(0, 15).to(torch.int32).unflatten(2, (4, 4))  # word, pair, which
    packed = torch.zeros(codes.shape[:3], dtype=torch.int32, device=weight.device)
    for pair in range(4):
        packed |= (codes[..., pair, 0] << (4 * pair)) | (codes[..., pair, 1] << (16 + 4 * pair))
    return Int4(packed.transpose(1, 2).contiguous(), scale.squeeze(2).contiguous(), bias, weight.dtype)


def dequantise(w: Int4) -> Tensor:
    """The weights [N, K] in the dtype they had."""
    n, groups = w.scales.shape
    places = torch.tensor([[4 * pair, 16 + 4 * pair] for pair in range(4)], device=w.codes.device, dtype=torch.int32)
    codes = (w.codes.transpose(1, 2)[..., None, None] >> places) & 15  # [N, G, word, pair, which]
    values = (codes.reshape(n, groups, PAIRS, 2) - 8) * w.scales.float()[..., None, None]
    return values.permute(0, 2, 1, 3).reshape(n, -1).to(w.dtype)


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
    outputs, part, warps = tile or pick_tile(n, groups, gated)
    assert x.dtype == torch.float16
    _row_product[(triton.cdiv(n, outputs),)](
        x.view(torch.int32) if x.is_cuda else x, w.codes, w.scales, y, x if w.bias is None else w.bias, n,
        FACTOR=factor, GROUPS=groups, BIAS=w.bias is not None, GATED=gated, ADD=add, BN=outputs, BG=part,
        SCALE=INNER if y.dtype == torch.float16 else 1.0, EVEN=n % outputs == 0 and groups % part == 0,
        PACKED=x.is_cuda, AHEAD=ahead, num_warps=warps, **options(ahead),
    )  # fmt: skip


def pick_tile(n: int, groups: int, gated: bool) -> tuple[int, int, int]:
    """Outputs and groups of a program, and its warps: what was fastest on an H200 for matrices of about this size."""
    wide = triton.next_power_of_2(groups)
    if gated:
        return 2, min(128, wide), 4
    if groups > 128:
        return 8, 64, 8
    return (8, min(128, wide), 8) if n <= 4096 else (4, min(64, wide), 4)


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
def _words(codes, row, g, inside, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """The four words of rows and groups, [ROWS, BG] each."""
    at = codes + row * 4 + g
    if EVEN:
        w0 = tl.load(at, eviction_policy="evict_first")
        w1 = tl.load(at + GROUPS, eviction_policy="evict_first")
        w2 = tl.load(at + 2 * GROUPS, eviction_policy="evict_first")
        w3 = tl.load(at + 3 * GROUPS, eviction_policy="evict_first")
    else:
        w0 = tl.load(at, mask=inside, other=0)
        w1 = tl.load(at + GROUPS, mask=inside, other=0)
        w2 = tl.load(at + 2 * GROUPS, mask=inside, other=0)
        w3 = tl.load(at + 3 * GROUPS, mask=inside, other=0)
    return w0, w1, w2, w3


@triton.jit
def _sum(w, x, pair, inside, GROUPS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr):
    """The weights of words w, in steps, times their inputs, whose first pair is `pair`; all [ROWS, BG]."""
    if PACKED:
        if EVEN:
            x0, x1 = tl.load(x + pair), tl.load(x + pair + GROUPS)
            x2, x3 = tl.load(x + pair + 2 * GROUPS), tl.load(x + pair + 3 * GROUPS)
        else:
            x0, x1 = tl.load(x + pair, mask=inside, other=0), tl.load(x + pair + GROUPS, mask=inside, other=0)
            x2 = tl.load(x + pair + 2 * GROUPS, mask=inside, other=0)
            x3 = tl.load(x + pair + 3 * GROUPS, mask=inside, other=0)
        return _eight(w, x0, x1, x2, x3)
    total = tl.zeros(w.shape, tl.float32)
    for j in tl.static_range(4):
        at = x + 2 * (pair + j * GROUPS)
        low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
        total += (((w >> (4 * j)) & 15) - 8).to(tl.float32) * low
        total += (((w >> (16 + 4 * j)) & 15) - 8).to(tl.float32) * high
    return total


@triton.jit
def _row_product(
    x, codes, scales, y, bias, n,
    FACTOR: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BN: tl.constexpr, BG: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    follow(AHEAD)
    ROWS: tl.constexpr = 2 * BN if GATED else BN  # gates, then the ups beside them
    m = tl.arange(0, ROWS)
    out = tl.program_id(0) * BN + m % BN
    r = out + m // BN * n
    row = r.to(tl.int64)[:, None] * GROUPS
    g = tl.arange(0, BG)[None, :]
    real = (out < n)[:, None]
    total = tl.zeros((ROWS, BG), tl.float32)
    w0, w1, w2, w3 = _words(codes, row, g, real & (g < GROUPS), GROUPS, EVEN)
    wait(AHEAD)
    for base in range(0, GROUPS, BG):
        v0, v1, v2, v3 = w0, w1, w2, w3
        if base + BG < GROUPS:
            w0, w1, w2, w3 = _words(codes, row, base + BG + g, real & (base + BG + g < GROUPS), GROUPS, EVEN)
        # Inputs are read in the shape of the words, the same ones by many threads: so none waits for another.
        inside = real & (base + g < GROUPS)
        pair = tl.broadcast_to(base + g, (ROWS, BG))
        if EVEN:
            scale = tl.load(scales + row + base + g, eviction_policy="evict_first").to(tl.float32)
        else:
            scale = tl.load(scales + row + base + g, mask=inside, other=0.0).to(tl.float32)
        part = _sum(v0, x, pair, inside, GROUPS, EVEN, PACKED)
        part += _sum(v1, x, pair + 4 * GROUPS, inside, GROUPS, EVEN, PACKED)
        part += _sum(v2, x, pair + 8 * GROUPS, inside, GROUPS, EVEN, PACKED)
        part += _sum(v3, x, pair + 12 * GROUPS, inside, GROUPS, EVEN, PACKED)
        total += part * scale
    sums = tl.sum(total, 1) * FACTOR
    if BIAS:
        sums += tl.load(bias + r, mask=out < n, other=0.0).to(tl.float32)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    if GATED:
        both = tl.reshape(sums, (2, BN))
        which = tl.arange(0, 2)[:, None]
        gate, up = tl.sum(tl.where(which == 0, both, 0.0), 0), tl.sum(tl.where(which == 1, both, 0.0), 0)
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        result = sums
    if ADD:
        result += tl.load(y + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, (result * SCALE).to(y.dtype.element_ty), mask=at < n)
