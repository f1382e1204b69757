"""Matmul of each expert's rows by its matrix in MXFP4, on tensor cores in bfloat16 (`models.quantized.fp4` has the
layout).

As in `quantized_kernels`: tensors of a program are [fours of blocks of inputs, groups of strips, strips of a group,
eights of rows, words of 32 lanes], and its warps divide the first or the second dimension. Numbers times their power of
two are exact in bfloat16, so sums are those of the same floats. Rows of another type take `experts.expert_matmul`.
"""

# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PLR0917
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.experts import ExpertBlocks, ExpertGate, ExpertOperand, Routes, gated_pair
from headway.kernels.triton.launch import launch_next, options, prefetch, wait
from headway.kernels.triton.mma import begun, fp4_sums, fp4_unpacked


@dataclass(frozen=True)
class Fp4Tile:
    """Strips per program (or with `wide` per warp) and fours of blocks of inputs per step, and its warps, which divide
    the inputs, or with `wide` the strips. `columns` is the number of eights of rows at a time."""

    strips: int
    inputs: int
    columns: int
    warps: int = 4
    wide: bool = False

    @property
    def rows(self) -> int:
        return 8 * self.columns


def fp4_matmul(
    x: Tensor,
    w: ExpertOperand,
    y: Tensor,
    routes: Routes,
    tile: Fp4Tile,
    *,
    by: ExpertBlocks | None = None,
    gate: ExpertGate | None = None,
    ahead: bool = False,
) -> None:
    """`experts.expert_matmul` of rows in bfloat16. A pair's bits depend on the tile's inputs and warps alone."""
    pairs, k, strips = routes.chosen.numel(), x.shape[1], w.weight.shape[1]
    n = y.shape[1] // 2 if w.gated and gate is None else y.shape[1]
    assert x.dtype == torch.bfloat16
    assert w.weight.is_contiguous()
    assert x.stride(1) == 1
    assert w.scales is not None
    assert gate is None or w.gated
    how, groups = gate or ExpertGate(""), tile.warps if tile.wide else 1
    blocks = pairs if by is None else len(by.blocks)
    _fp4_matmul[(blocks, triton.cdiv(strips, groups * tile.strips))](
        x.view(torch.int32), w.weight, w.scales.view(torch.int32), y, w.bias, routes.chosen if by is None else by.order,
        None if by is None else by.blocks, n, strips, x.stride(0) // 2,
        PER=pairs // x.shape[0], K=k, FACTOR=2.0**w.exponent, PAIRED=w.gated, GATED=gate is not None,
        KIND=how.activation, CLAMP=how.clamp or 0.0, ALPHA=how.alpha, GROUPS=groups, PARTS=tile.strips,
        COLS=tile.columns, DEEP=tile.inputs, EVEN=k % (256 * tile.inputs) == 0, AHEAD=ahead, num_warps=tile.warps,
        **options(ahead),
    )  # fmt: skip


def pick_fp4_tile(rows: float, *, deterministic: bool = False) -> Fp4Tile:
    """The fastest tile on an H200 for experts of about so many rows each; the one of all in deterministic mode."""
    if deterministic:
        return Fp4Tile(1, 1, 2, wide=True)
    if rows <= 2:
        return Fp4Tile(1, 2, 1, warps=2)
    return Fp4Tile(2, 1, 2 if rows <= 16 else 8, wide=True)


def fp4_add_down(x: Tensor, w: ExpertOperand, y: Tensor, routes: Routes, *, ahead: bool = False) -> None:
    """Add to y [E] the weighted sum of what the experts of a row make of x [k, F] in bfloat16."""
    (pairs, k), n, strips = x.shape, len(y), w.weight.shape[1]
    assert x.dtype == torch.bfloat16
    assert w.scales is not None
    assert not w.gated
    slots, deep = triton.next_power_of_2(pairs), 2 if k > 256 else 1
    _fp4_add_down[(strips,)](
        x.view(torch.int32), w.weight, w.scales.view(torch.int32), y, w.bias, routes.chosen, routes.weights, n, strips,
        x.stride(0) // 2, K=k, FACTOR=2.0**w.exponent, PAIRS=pairs, SLOTS=slots, DEEP=deep, EVEN=k % (256 * deep) == 0,
        AHEAD=ahead, num_warps=min(16, slots * deep), **options(ahead),
    )  # fmt: skip


@triton.jit
def _loaded_in_place(at):
    """Numbers in memory, int32, in the layout of what reads them: a load would bring one of its own."""
    return tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], tl.int32, True, 1)


@triton.jit
def _four(at, scale_at, q, deep, INPUTS: tl.constexpr, EVEN: tl.constexpr):
    """A lane's words of four blocks of inputs, the q-th four, and their scales."""
    at += q * 512
    if EVEN:
        a = tl.load(at, eviction_policy="evict_first")
        b = tl.load(at + 128, eviction_policy="evict_first")
        c = tl.load(at + 256, eviction_policy="evict_first")
        d = tl.load(at + 384, eviction_policy="evict_first")
        s = tl.load(scale_at + q * 32, eviction_policy="evict_first")
    else:
        block = (q + deep) * 4
        a = tl.load(at, mask=block < INPUTS, other=0, eviction_policy="evict_first")
        b = tl.load(at + 128, mask=block + 1 < INPUTS, other=0, eviction_policy="evict_first")
        c = tl.load(at + 256, mask=block + 2 < INPUTS, other=0, eviction_policy="evict_first")
        d = tl.load(at + 384, mask=block + 3 < INPUTS, other=0, eviction_policy="evict_first")
        s = tl.load(scale_at + q * 32, mask=block < INPUTS, other=0, eviction_policy="evict_first")
    return a, b, c, d, s


@triton.jit
def _one(total, w, s, xs, q, deep, BLOCK: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """The totals plus one block of a four, of which a lane has eight inputs of each of two groups."""
    xs += q * 128 + BLOCK * 32
    if EVEN:
        xa, xb = tl.load(xs), tl.load(xs + 16)
    else:
        block = (q + deep) * 4 + BLOCK
        xa = tl.load(xs, mask=block < (K + 63) // 64, other=0)
        xb = tl.load(xs + 16, mask=block < (K + 31) // 64, other=0)
    a0, a1, a2, a3 = fp4_unpacked(w, s, BLOCK)
    return fp4_sums(total, a0, a1, a2, a3, xa, xb)


@triton.jit
def _added(total, a, b, c, d, s, xs, q, deep, K: tl.constexpr, EVEN: tl.constexpr):
    """The totals plus four blocks."""
    total = _one(total, a, s, xs, q, deep, 0, K, EVEN)
    total = _one(total, b, s, xs, q, deep, 1, K, EVEN)
    total = _one(total, c, s, xs, q, deep, 2, K, EVEN)
    return _one(total, d, s, xs, q, deep, 3, K, EVEN)


@triton.jit
def _fp4_matmul(
    x, words, scales, y, bias, order, blocks, n, strips, x_row,
    PER: tl.constexpr, K: tl.constexpr, FACTOR: tl.constexpr, PAIRED: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, CLAMP: tl.constexpr, ALPHA: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    COLS: tl.constexpr, DEEP: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    INPUTS: tl.constexpr = (K + 63) // 64
    FOURS: tl.constexpr = (K + 255) // 256
    OWN: tl.constexpr = GROUPS * PARTS
    deep = tl.arange(0, DEEP)[:, None, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None, None]
    e = tl.arange(0, 128)[None, None, None, None, :]
    block = tl.program_id(0)
    wait(AHEAD)
    if blocks is None:
        expert, first, count = tl.load(order + block).to(tl.int64), block, 1
    else:
        count = tl.load(blocks + block * 3 + 2)
        if count == 0:
            return
        expert, first = tl.load(blocks + block * 3).to(tl.int64), tl.load(blocks + block * 3 + 1)
    if AHEAD and GROUPS == 1:
        begin = expert * strips + tl.program_id(1) * PARTS
        prefetch(words + begin * INPUTS * 128, tl.minimum(PARTS, strips - tl.program_id(1) * PARTS) * INPUTS * 512)
    # Missing strips and rows repeat the last one; their results are not stored.
    strip = tl.minimum(tl.program_id(1) * OWN + group * PARTS + part, strips - 1)
    own = expert * strips + strip
    at = words + (own * INPUTS + deep * 4) * 128 + e
    scale_at = scales + (own * FOURS + deep) * 32 + e // 16 * 4 + e % 4
    row = tl.minimum(tl.arange(0, COLS)[None, None, None, :, None] * 8 + e // 16, count - 1)
    pair = first + row
    if blocks is not None:
        pair = _loaded_in_place(order + pair)
    begin = tl.multiple_of(tl.max_constancy((pair // PER) * x_row, [1, 1, 1, 1, 16]), [1, 1, 1, 1, 16])
    xs = begin + deep * 128 + e // 4 % 4 * 4 + e % 4
    xs = x + tl.broadcast_to(xs, (DEEP, GROUPS, 1, COLS, 128))  # every warp loads its own inputs
    total = tl.zeros((DEEP, GROUPS, PARTS, COLS, 128), tl.float32)
    a, b, c, d, s = _four(at, scale_at, 0, deep, INPUTS, EVEN)
    for q in range(0, FOURS, 2 * DEEP):  # two steps: one loads while the other computes
        a1, b1, c1, d1, s1 = _four(at, scale_at, q + DEEP, deep, INPUTS, False)
        begun()
        total = _added(total, a, b, c, d, s, xs, q, deep, K, EVEN)
        if q + DEEP < FOURS:
            a, b, c, d, s = _four(at, scale_at, q + 2 * DEEP, deep, INPUTS, False)
            begun()
            total = _added(total, a1, b1, c1, d1, s1, xs, q + DEEP, deep, K, EVEN)
    values = tl.reshape(tl.sum(total, 0), (OWN, COLS, 128)) * FACTOR
    _store(values, y, bias, order, expert, first, count, n, blocks is None, PAIRED, GATED, KIND, CLAMP, ALPHA)


@triton.jit
def _store(
    values, y, bias, order, expert, first, count, n,
    ALONE: tl.constexpr, PAIRED: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, CLAMP: tl.constexpr,
    ALPHA: tl.constexpr,
):  # fmt: skip
    """Stores a program's sums [strips, COLS, 128] of pairs, that are alone or in order, with biases and gates."""
    OWN: tl.constexpr = values.shape[0]
    COLS: tl.constexpr = values.shape[1]
    strip = tl.program_id(1) * OWN + tl.arange(0, OWN)
    if PAIRED:
        lane, odd = tl.arange(0, 32)[None, None, :, None], tl.arange(0, 2)[None, None, None, :]
        values, up = tl.split(tl.permute(tl.reshape(values, (OWN, COLS, 32, 2, 2)), (0, 1, 2, 4, 3)))
        output = strip[:, None, None, None] * 8 + lane // 4
        row = tl.arange(0, COLS)[None, :, None, None] * 8 + lane % 4 * 2 + odd
    else:
        c = tl.arange(0, 128)[None, None, :]
        output = strip[:, None, None] * 16 + c // 16 + c % 4 // 2 * 8
        row = tl.arange(0, COLS)[None, :, None] * 8 + c // 4 % 4 * 2 + c % 2
    outputs = 2 * n if PAIRED else n
    pair = first + row if ALONE else tl.load(order + first + row, mask=row < count, other=0)
    if bias is not None:
        own = bias + expert * outputs + output
        values += tl.load(own, mask=output < n, other=0.0).to(tl.float32)
    there, place = (row < count) & (output < n), y + pair.to(tl.int64) * (n if GATED else outputs) + output
    if PAIRED:
        if bias is not None:
            up += tl.load(own + n, mask=output < n, other=0.0).to(tl.float32)
        if GATED:
            values = gated_pair(values, up, KIND, CLAMP, ALPHA)
        else:
            tl.store(place + n, up.to(y.dtype.element_ty), mask=there)
    tl.store(place, values.to(y.dtype.element_ty), mask=there)


@triton.jit
def _fp4_add_down(
    x, words, scales, y, bias, chosen, weights, n, strips, x_row,
    K: tl.constexpr, FACTOR: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr, DEEP: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A program for each strip, whose warps divide the experts and the inputs."""
    launch_next(AHEAD)
    INPUTS: tl.constexpr = (K + 63) // 64
    FOURS: tl.constexpr = (K + 255) // 256
    deep = tl.arange(0, DEEP)[:, None, None, None, None]
    slot = tl.arange(0, SLOTS)[None, :, None, None, None]
    e = tl.arange(0, 128)[None, None, None, None, :]
    strip = tl.program_id(0)
    wait(AHEAD)
    if AHEAD:
        for j in tl.static_range(PAIRS):
            begin = tl.load(chosen + j).to(tl.int64) * strips + strip
            prefetch(words + begin * INPUTS * 128, INPUTS * 512)
    own = _loaded_in_place(chosen + tl.minimum(slot, PAIRS - 1)).to(tl.int64) * strips + strip
    at = words + (own * INPUTS + deep * 4) * 128 + e
    scale_at = scales + (own * FOURS + deep) * 32 + e // 16 * 4 + e % 4
    xs = x + tl.minimum(slot, PAIRS - 1) * x_row + deep * 128 + e // 4 % 4 * 4 + e % 4
    total = tl.zeros((DEEP, SLOTS, 1, 1, 128), tl.float32)
    a, b, c, d, s = _four(at, scale_at, 0, deep, INPUTS, EVEN)
    for q in range(0, FOURS, 2 * DEEP):
        a1, b1, c1, d1, s1 = _four(at, scale_at, q + DEEP, deep, INPUTS, False)
        begun()
        total = _added(total, a, b, c, d, s, xs, q, deep, K, EVEN)
        if q + DEEP < FOURS:
            a, b, c, d, s = _four(at, scale_at, q + 2 * DEEP, deep, INPUTS, False)
            begun()
            total = _added(total, a1, b1, c1, d1, s1, xs, q + DEEP, deep, K, EVEN)
    values = tl.reshape(tl.sum(total, 0), (SLOTS, 8, 4, 2, 2)) * FACTOR  # experts, r, q, h, one of two rows
    values = tl.reshape(tl.sum(tl.sum(tl.where(_first_row(), values, 0.0), 4), 2), (SLOTS, 16))  # r, h
    j, o = tl.arange(0, SLOTS)[:, None], tl.arange(0, 16)
    output = strip * 16 + o // 2 + o % 2 * 8
    live = (j < PAIRS) & (output < n)[None, :]
    if bias is not None:
        expert = tl.load(chosen + j, mask=j < PAIRS, other=0).to(tl.int64)
        values += tl.load(bias + expert * n + output[None, :], mask=live, other=0.0).to(tl.float32)
    values = tl.where(live, values * tl.load(weights + j, mask=j < PAIRS, other=0.0), 0.0)
    result = tl.sum(values, 0) + tl.load(y + output, mask=output < n, other=0.0).to(tl.float32)
    tl.store(y + output, result.to(y.dtype.element_ty), mask=output < n)


@triton.jit
def _first_row():
    """Of sums [experts, r, q, h, i], whose row is 2q + i, those of row 0."""
    q, i = tl.arange(0, 4)[None, None, :, None, None], tl.arange(0, 2)[None, None, None, None, :]
    return (q == 0) & (i == 0)
