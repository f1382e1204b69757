"""Kernels for quantized weights: matmul, matvec, dequantize (`quantized` describes the memory layout).

A matmul runs on tensor cores (`mma`). Quants are stored so that each lane's own bytes are what its instructions need:
lanes exchange nothing. Tensors of a program are [blocks of inputs, groups of output blocks, blocks of a group, eights
of rows, words of 32 lanes]; its warps divide the first or the second dimension. The kernels rely on the layout in which
Triton loads them: four adjacent words, 16 bytes, per lane. Triton's interpreter has no such instructions and adds the
same terms one by one.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.triton.launch import launch_next, prefetch, wait
from headway.kernels.triton.mma import begun, row_sums, sums


@triton.jit
def _load_quants(
    at, scale_at, d, deep, INPUTS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr
):
    """A lane's words of the input blocks from d on, and their scales."""
    WORDS: tl.constexpr = 128 if KIND == "int4" else 256
    if EVEN:
        w0 = tl.load(at + d * WORDS, eviction_policy="evict_first")
    else:
        w0 = tl.load(at + d * WORDS, mask=d + deep < INPUTS, other=0)
    w1, s = w0, w0
    if KIND != "int4":
        if EVEN:
            w1 = tl.load(at + d * WORDS + 128, eviction_policy="evict_first")
        else:
            w1 = tl.load(at + d * WORDS + 128, mask=d + deep < INPUTS, other=0)
    elif PACKED:
        if EVEN:
            s = tl.load(scale_at + d * 32, eviction_policy="evict_first")
        else:
            s = tl.load(scale_at + d * 32, mask=d + deep < INPUTS, other=0.0)
    return w0, w1, s


@triton.jit
def _rows(x, pair, e, d, deep, K: tl.constexpr, EVEN: tl.constexpr):
    """A lane's eight pairs of inputs of the blocks from d on, as two words of four."""
    if EVEN:
        return tl.load(x + pair + d * 32 + e % 4), tl.load(x + pair + d * 32 + 4 + e % 4)
    inside = (d + deep) * 64 + e // 4 % 4 * 16 + 16 <= K
    xa = tl.load(x + pair + d * 32 + e % 4, mask=inside, other=0)
    xb = tl.load(x + pair + d * 32 + 4 + e % 4, mask=inside, other=0)
    return xa, xb


@triton.jit
def _value(w0, w1, h: tl.constexpr, p: tl.constexpr, i: tl.constexpr, KIND: tl.constexpr):
    """The unscaled weight of output r + 8h and input 4t + 2p + i, as float32."""
    if KIND == "int4":
        return (((w0 >> (4 * h + 8 * p + 16 * i)) & 15) - 8).to(tl.float32)
    else:
        word = w0 if h == 0 else w1
        byte = (word >> (16 * p + 8 * i)) & 255
        return (byte - 128).to(tl.float32)


@triton.jit
def _one_by_one(w0, w1, scales, x, pair, inside, h: tl.constexpr, KIND: tl.constexpr):
    """Sums [DEEP, OWN, COLS, 8, 8] of outputs r + 8h and rows; x is at `pair`."""
    deep: tl.constexpr = w0.shape[0]
    parts: tl.constexpr = w0.shape[1] * w0.shape[2]
    cols: tl.constexpr = pair.shape[3]
    total = tl.zeros((deep, parts, cols, 8, 8), tl.float32)
    for p in tl.static_range(2):
        for i in tl.static_range(2):
            a = _value(w0, w1, h, p, i, KIND)
            if KIND == "int4":
                a = a * scales
            b = tl.load(x + 2 * (pair + p) + i, mask=inside, other=0.0).to(tl.float32)
            a = tl.reshape(a, (deep, parts, 1, 8, 1, 16))
            b = tl.reshape(b, (deep, 1, cols, 1, 8, 16))
            total += tl.sum(a * b, 5)
    return total


@triton.jit
def _sums_one_by_one(
    total, w0, w1, scales, base, x, pair, e, d, deep, K: tl.constexpr, INPUTS: tl.constexpr, KIND: tl.constexpr
):
    """The totals plus the same terms, added one by one: for the interpreter."""
    DEEP: tl.constexpr = total.shape[0]
    OWN: tl.constexpr = total.shape[1] * total.shape[2]
    COLS: tl.constexpr = total.shape[3]
    there = d + deep < INPUTS
    inside = there & ((d + deep) * 64 + e // 4 % 4 * 16 + 16 <= K)
    s0, s1 = w0, w0
    if KIND == "int4":
        own = scales + (base + d) * 32 + e // 16 * 4 + e % 4 // 2
        s0 = tl.load(own, mask=there, other=0.0).to(tl.float32)
        s1 = tl.load(own + 2, mask=there, other=0.0).to(tl.float32)
    first = pair + d * 32 + e % 4 * 2
    low = _one_by_one(w0, w1, s0, x, first, inside, 0, KIND)
    high = _one_by_one(w0, w1, s1, x, first, inside, 1, KIND)
    both = tl.reshape(tl.join(low, high), (DEEP, OWN, COLS, 8, 4, 2, 2))  # r, row // 2, row % 2, h
    return total + tl.reshape(tl.permute(both, (0, 1, 2, 3, 4, 6, 5)), total.shape)


@triton.jit
def matmul(
    x, quants, scales, y, bias, rows, n, blocks,
    K: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr,
    DEEP: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr, FACTOR: tl.constexpr,
    SCALE: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows of x, float16 (two to a word with PACKED), times the matrix; see `quantized.matmul`.

    Warps divide the inputs, DEEP blocks of them, or with GROUPS the outputs. In the first case all quants of a program
    are prefetched to the L2 cache before the previous kernel has ended.
    """
    launch_next(AHEAD)
    INPUTS: tl.constexpr = (K + 63) // 64
    WORDS: tl.constexpr = 128 if KIND == "int4" else 256
    OWN: tl.constexpr = GROUPS * PARTS  # output blocks per program
    deep = tl.arange(0, DEEP)[:, None, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None, None]
    e = tl.arange(0, 128)[None, None, None, None, :]
    # Missing blocks and rows repeat the last one; their results are not stored.
    block = tl.minimum(tl.program_id(1) * OWN + group * PARTS + part, blocks - 1)
    base = block.to(tl.int64) * INPUTS + deep
    at, scale_at = quants + base * WORDS + e, scales + base * 32 + e // 16 * 4 + e % 4
    if AHEAD and GROUPS == 1:
        start = tl.program_id(1).to(tl.int64) * OWN * INPUTS
        prefetch(quants + start * WORDS, OWN * INPUTS * WORDS * 4)
        if KIND == "int4":
            prefetch(scales + start * 32, OWN * INPUTS * 64)
    w0, w1, s = _load_quants(at, scale_at, 0, deep, INPUTS, KIND, EVEN, PACKED)
    row = tl.minimum((tl.program_id(0) * COLS + tl.arange(0, COLS))[None, None, None, :, None] * 8 + e // 16, rows - 1)
    pair = row * (K // 2) + deep * 32 + e // 4 % 4 * 8  # address of a lane's first two inputs
    total = tl.zeros((DEEP, GROUPS, PARTS, COLS, 128), tl.float32)
    wait(AHEAD)
    if PACKED:
        pair = tl.broadcast_to(pair, (DEEP, GROUPS, 1, COLS, 128))  # every warp loads its own inputs
        xa, xb = _rows(x, pair, e, 0, deep, K, EVEN)
        for d in range(0, INPUTS, 2 * DEEP):  # two steps: one loads while the other computes
            v0, v1, t = _load_quants(at, scale_at, d + DEEP, deep, INPUTS, KIND, EVEN, PACKED)
            ya, yb = _rows(x, pair, e, d + DEEP, deep, K, EVEN)
            begun()
            total = sums(total, w0, w1, s, xa, xb, KIND)
            if d + 2 * DEEP < INPUTS:
                w0, w1, s = _load_quants(at, scale_at, d + 2 * DEEP, deep, INPUTS, KIND, EVEN, PACKED)
                xa, xb = _rows(x, pair, e, d + 2 * DEEP, deep, K, EVEN)
            begun()
            total = sums(total, v0, v1, t, ya, yb, KIND)
    else:
        for d in range(0, INPUTS, DEEP):
            w0, w1, _ = _load_quants(at, scale_at, d, deep, INPUTS, KIND, EVEN, PACKED)
            total = _sums_one_by_one(total, w0, w1, scales, base, x, pair, e, d, deep, K, INPUTS, KIND)
    values = tl.reshape(tl.sum(total, 0), (OWN, COLS, 128)) * FACTOR
    _store(values, scales, y, bias, rows, n, blocks, KIND, GATED, ADD, BIAS, BY_ROW, SCALE, PACKED)


@triton.jit
def _load_row_quants(at, deep, d, INPUTS: tl.constexpr, EVEN: tl.constexpr):
    """Words of one block in each of DEEP groups of four, from block d on."""
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=d + deep * 4 < INPUTS, other=0)


@triton.jit
def _four(at, scale_at, xat, d, deep, e, K: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr):
    """Four blocks of inputs from d on, for each of DEEP: words of outputs r and r + 8, and scales."""
    INPUTS: tl.constexpr = (K + 63) // 64
    WORDS: tl.constexpr = 128 if KIND == "int4" else 256 if KIND == "int8" else 16
    HIGH: tl.constexpr = 2 * K if KIND == "fp8" else 128  # from outputs r to r + 8
    at += d * WORDS
    a0 = _load_row_quants(at, deep, d, INPUTS, EVEN)
    b0 = _load_row_quants(at + WORDS, deep, d + 1, INPUTS, EVEN)
    c0 = _load_row_quants(at + 2 * WORDS, deep, d + 2, INPUTS, EVEN)
    d0 = _load_row_quants(at + 3 * WORDS, deep, d + 3, INPUTS, EVEN)
    a1, b1, c1, d1, s = a0, b0, c0, d0, a0
    if KIND == "int4":
        if EVEN:
            s = tl.load(scale_at + d * 32, eviction_policy="evict_first")
        else:
            s = tl.load(scale_at + d * 32, mask=d + deep * 4 + e // 4 % 4 < INPUTS, other=0.0)
    else:
        a1 = _load_row_quants(at + HIGH, deep, d, INPUTS, EVEN)
        b1 = _load_row_quants(at + WORDS + HIGH, deep, d + 1, INPUTS, EVEN)
        c1 = _load_row_quants(at + 2 * WORDS + HIGH, deep, d + 2, INPUTS, EVEN)
        d1 = _load_row_quants(at + 3 * WORDS + HIGH, deep, d + 3, INPUTS, EVEN)
    return a0, b0, c0, d0, a1, b1, c1, d1, s


@triton.jit
def _inputs(xat, d, deep, e, K: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr):
    """A lane's eight inputs: of block r // 2 of four, group r % 2, the q-th of its quarters."""
    if EVEN:
        x = tl.load(xat + d * 32)
    else:
        x = tl.load(xat + d * 32, mask=(d + deep * 4 + e // 32) * 64 + e // 4 % 4 * 16 + 16 <= K, other=0)
    if KIND == "fp8":
        return tl.inline_asm_elementwise("cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [x], tl.int32, True, 1)
    else:
        return x


@triton.jit
def matvec(
    x, x_scales, quants, scales, y, bias, n,
    K: tl.constexpr, KIND: tl.constexpr, DEEP: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, FACTOR: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One row of x times the matrix, in fewer instructions: the eight columns of an `mma` are groups of its inputs.

    A step is DEEP groups of four blocks, one for each warp. A matrix in fp8 is stored by rows, and x is in fp8 too
    (`scaled_matmul`): both become float16 on the way.
    """
    launch_next(AHEAD)
    INPUTS: tl.constexpr = (K + 63) // 64
    WORDS: tl.constexpr = 128 if KIND == "int4" else 256
    STEP: tl.constexpr = 4 * DEEP
    block = tl.program_id(0)
    start = block.to(tl.int64) * INPUTS
    deep = tl.arange(0, DEEP)[:, None]
    e = tl.arange(0, 128)[None, :]
    if KIND == "fp8":
        at = quants + (block.to(tl.int64) * 16 + e // 16) * (K // 4) + deep * 64 + e % 16
    else:
        at = quants + (start + deep * 4) * WORDS + e
    scale_at = scales + (start + deep * 4 + e // 4 % 4) * 32 + e // 16 * 4 + e % 4
    xat = x + (deep * 4 + e // 32) * 32 + e // 4 % 4 * 8 + e // 16 % 2 * 4 + e % 4
    total = tl.zeros((DEEP, 128), tl.float32)
    a0, b0, c0, d0, a1, b1, c1, d1, s = _four(at, scale_at, xat, 0, deep, e, K, KIND, EVEN)
    wait(AHEAD)
    v = _inputs(xat, 0, deep, e, K, KIND, EVEN)
    if INPUTS <= STEP:
        total = row_sums(total, v, a0, b0, c0, d0, a1, b1, c1, d1, s, KIND)
    else:
        for d in range(0, INPUTS, 2 * STEP):  # two steps: one loads while the other computes
            e0, f0, g0, h0, e1, f1, g1, h1, t = _four(at, scale_at, xat, d + STEP, deep, e, K, KIND, EVEN)
            w = _inputs(xat, d + STEP, deep, e, K, KIND, EVEN)
            begun()
            total = row_sums(total, v, a0, b0, c0, d0, a1, b1, c1, d1, s, KIND)
            if d + 2 * STEP < INPUTS:
                a0, b0, c0, d0, a1, b1, c1, d1, s = _four(at, scale_at, xat, d + 2 * STEP, deep, e, K, KIND, EVEN)
                v = _inputs(xat, d + 2 * STEP, deep, e, K, KIND, EVEN)
            begun()
            total = row_sums(total, w, e0, f0, g0, h0, e1, f1, g1, h1, t, KIND)
    values = tl.sum(tl.reshape(tl.sum(total, 0), (8, 4, 4)), 1) * FACTOR  # [r, (h, -)]
    if KIND == "fp8":
        values *= tl.load(x_scales)
    _store_row(values, block, scales, y, bias, n, KIND, GATED, ADD, BIAS, SCALE)


@triton.jit
def _store_row(
    values, block, scales, y, bias, n,
    KIND: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Scales the sums [8, 4] of a block's outputs r and r + 8, applies bias and gate, and stores them."""
    h = tl.arange(0, 4)[None, :]
    r = tl.arange(0, 8)[:, None]
    if KIND == "int4":
        values = values * tl.where(h == 0, 16777216.0, 1048576.0)
    else:
        values = values * tl.load(scales + block * 16 + r + h % 2 * 8)
        if KIND == "int8":
            values = values * 16777216.0
    if GATED:
        where = block * 8 + r
        if BIAS:
            values += tl.load(bias + where + h % 2 * n, mask=where < n, other=0.0).to(tl.float32)
        gate = tl.sum(tl.where(h == 0, values, 0.0), 1)[:, None]
        up = tl.sum(tl.where(h == 1, values, 0.0), 1)[:, None]
        values = gate / (1.0 + tl.exp(-gate)) * up
        inside = (where < n) & (h == 0)
    else:
        where = block * 16 + r + h % 2 * 8
        if BIAS:
            values += tl.load(bias + where, mask=where < n, other=0.0).to(tl.float32)
        inside = (where < n) & (h < 2)
    where = tl.broadcast_to(where, (8, 4))
    if ADD:
        values += tl.load(y + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + where, (values * SCALE).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    values, scales, y, bias, rows, n, blocks,
    KIND: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr,
    SCALE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Scales a program's sums [PARTS, COLS, 128], applies bias and gate, and stores them.

    With BY_ROW each row has a bias of its own.
    """
    PARTS: tl.constexpr = values.shape[0]
    COLS: tl.constexpr = values.shape[1]
    part = tl.arange(0, PARTS)[:, None, None]
    e = tl.arange(0, 128)[None, None, :]
    block = tl.program_id(1) * PARTS + part
    output = e // 16 + e % 4 // 2 * 8  # of 16
    if KIND != "int4":
        values = values * tl.load(scales + tl.minimum(block, blocks - 1) * 16 + output)
    if PACKED and KIND == "int4":
        values = values * tl.where(output < 8, 1.0, 0.0625)
    if GATED:
        # Outputs r of a block are gates and r + 8 their ups.
        lane = tl.arange(0, 32)[None, None, :, None]
        odd = tl.arange(0, 2)[None, None, None, :]
        gate, up = tl.split(tl.permute(tl.reshape(values, (PARTS, COLS, 32, 2, 2)), (0, 1, 2, 4, 3)))
        where = (tl.program_id(1) * PARTS + tl.arange(0, PARTS))[:, None, None, None] * 8 + lane // 4
        row = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :, None, None] * 8 + lane % 4 * 2 + odd
        if BY_ROW:
            own, there = bias + row.to(tl.int64) * 2 * n + where, (where < n) & (row < rows)
            gate += tl.load(own, mask=there, other=0.0)
            up += tl.load(own + n, mask=there, other=0.0)
        elif BIAS:
            gate += tl.load(bias + where, mask=where < n, other=0.0).to(tl.float32)
            up += tl.load(bias + n + where, mask=where < n, other=0.0).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        where = block * 16 + output
        row = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :, None] * 8 + e // 4 % 4 * 2 + e % 2
        if BIAS:
            values += tl.load(bias + where, mask=where < n, other=0.0).to(tl.float32)
        result = values
    inside = (where < n) & (row < rows)
    place = y + row.to(tl.int64) * n + where
    if ADD:
        result += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (result * SCALE).to(y.dtype.element_ty), mask=inside)


@triton.jit
def dequantize(quants, scales, out, n, K: tl.constexpr, KIND: tl.constexpr, DEEP: tl.constexpr, GATED: tl.constexpr):
    """Dequantizes one block of outputs by DEEP blocks of inputs."""
    INPUTS: tl.constexpr = (K + 63) // 64
    WORDS: tl.constexpr = 128 if KIND == "int4" else 256
    block = tl.program_id(0)
    deep = tl.program_id(1) * DEEP + tl.arange(0, DEEP)[:, None]
    e = tl.arange(0, 128)[None, :]
    base = block.to(tl.int64) * INPUTS + deep
    w0 = tl.load(quants + base * WORDS + e, mask=deep < INPUTS, other=0)
    w1 = tl.load(quants + base * WORDS + 128 + e, mask=deep < INPUTS, other=0) if KIND != "int4" else w0
    place = tl.arange(0, 512)[None, :]  # 16 inputs of 32 lanes
    column = deep * 64 + place // 16 % 4 * 16 + place % 16
    for h in tl.static_range(2):
        p0 = tl.join(_value(w0, w1, h, 0, 0, KIND), _value(w0, w1, h, 0, 1, KIND))
        p1 = tl.join(_value(w0, w1, h, 1, 0, KIND), _value(w0, w1, h, 1, 1, KIND))
        both = tl.permute(tl.join(p0, p1), (0, 1, 3, 2))  # [DEEP, 128, p, i]
        values = tl.reshape(both, (DEEP, 512))
        if KIND == "int4":
            own = scales + base * 32 + place // 64 * 4 + h * 2 + place % 16 // 8
            values = values * tl.load(own, mask=deep < INPUTS, other=0.0).to(tl.float32)
        else:
            values = values * tl.load(scales + block * 16 + place // 64 + 8 * h)
        output = block * 8 + place // 64 if GATED else block * 16 + place // 64 + 8 * h
        at = out + (output + h * n if GATED else output).to(tl.int64) * K + column
        tl.store(at, values.to(out.dtype.element_ty), mask=(output < n) & (column < K))
