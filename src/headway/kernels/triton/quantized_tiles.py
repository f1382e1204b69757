"""Matmul of many rows with quantized weights: tiles of quants become float16 on the way to the tensor cores.

The kernels of `quantized_kernels` take at most 32 rows at a time, and load them again for every 16 or 32 outputs: with
more rows that traffic takes the time. These take all of up to 64 rows for 32 to 128 outputs, and as many programs for
more rows as there are tiles. They read the same blocks: with 8 bits a block of 16 outputs by 64 inputs is row-major,
with four a step takes the two groups of a block apart.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.launch import launch_next, prefetch, wait

BLOCK = 64  # inputs of a block
LEAST = 17  # rows from which these kernels are faster
SPLIT_OUTPUTS, MOST_SPLITS = 8192, 8  # up to this many outputs programs divide the inputs, at most so often


@dataclass(frozen=True)
class ByteTile:
    """Rows, outputs and blocks of inputs per step of a program (two of four-bit quants), and its launch parameters.

    With `weights_first` the weights are the first operand, which tensor cores take from registers; else the rows are.
    With `splits` the inputs are divided among programs, for matrices of few outputs.
    """

    rows: int
    outputs: int
    deep: int
    warps: int = 4
    stages: int = 4
    weights_first: bool = True
    splits: int = 1


@dataclass(frozen=True, eq=False)
class SplitSums:
    """Workspace for the parts of one matmul at a time. `arrived` is zero between calls."""

    parts: Tensor  # [splits · outputs · rows] float32
    arrived: Tensor  # [tiles] int32

    @classmethod
    def of(cls, outputs: int, rows: int, device: torch.device, splits: int = MOST_SPLITS) -> SplitSums:
        """Room for a matmul of this size, in tiles of at least 16 by 16."""
        size = splits * -(-outputs // 128) * 128 * -(-rows // 64) * 64
        parts = torch.empty(size, dtype=torch.float32, device=device)
        return cls(parts, torch.zeros(size // splits // 256, dtype=torch.int32, device=device))


def pick_byte_tile(rows: int, outputs: int, inputs: int, shared_memory: int) -> ByteTile:
    """The fastest tile on an H200 for this many rows, and a matrix of this size.

    `shared_memory` is what a program may use, in bytes; a smaller device gets fewer stages.
    """
    most = 64 if rows > 32 else 32
    if outputs > SPLIT_OUTPUTS:
        tile = ByteTile(most, 128, 1, stages=6 if rows > 32 else 8, weights_first=False)
    elif inputs <= 8192:
        tile = ByteTile(most, 64, 1, stages=8, splits=4)
    else:
        tile = (
            ByteTile(64, 64, 2, stages=4, splits=4) if rows > 32 else ByteTile(32, 64, 1, stages=8, splits=MOST_SPLITS)
        )
    tile = tile if rows <= tile.rows else replace(tile, splits=1)  # programs are many, and the workspace is small
    stage = BLOCK * tile.deep * (2 * tile.rows + tile.outputs)
    floats = 0 if tile.weights_first else 2 * BLOCK * tile.deep * tile.outputs
    return replace(tile, stages=max(1, min(tile.stages, (shared_memory - floats) // stage)))


def pick_nibble_tile(rows: int, outputs: int, inputs: int, shared_memory: int) -> ByteTile | None:
    """The same for four-bit quants; None where the kernels for few rows are faster."""
    if rows <= 32 or rows > 64 or outputs <= SPLIT_OUTPUTS:
        return None
    tile = ByteTile(64, 256, 1, warps=8)
    stage = 2 * (tile.outputs * 32 + tile.rows * 128)
    floats = 2 * tile.outputs * 64
    return replace(tile, stages=max(1, min(tile.stages, (shared_memory - floats) // stage)))


@triton.jit
def _floats(quants, PACKED: tl.constexpr):
    """Bytes as float16, exactly; on a device four at a time."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 k, m;
            mov.b32 k, 0x64646464;
            mov.b32 m, 0x64806480;
            prmt.b32 $0, $2, k, 0x4140;
            prmt.b32 $1, $2, k, 0x4342;
            sub.rn.f16x2 $0, $0, m;
            sub.rn.f16x2 $1, $1, m;
            }
            """,
            "=&r,=&r,r", [quants], tl.float16, True, 4,
        )  # fmt: skip
    else:
        return (quants.to(tl.int32) - 128).to(tl.float16)


@triton.jit
def _tile(at, d, inside, EVEN: tl.constexpr):
    """A tile of the blocks from d on; zeros where nothing is."""
    if EVEN:
        return tl.load(at + d)
    return tl.load(at + d, mask=inside, other=0)


@triton.jit
def _nibbles(words, PACKED: tl.constexpr):
    """Four-bit quants of words [B, 128] as float16, [16 B, 32] for each of the two groups of inputs.

    Outputs come in the order block, r, h. On a device those of h = 1 are 16 times as large.
    """
    if PACKED:
        u0, u1, u2, u3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 u, k, l, m;
            mov.b32 k, 0x64006400;
            mov.b32 l, 0x64086408;
            mov.b32 m, 0x64806480;
            shr.u32 u, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, k, 0xea;
            lop3.b32 $1, u, 0x000f000f, k, 0xea;
            lop3.b32 $2, $4, 0x00f000f0, k, 0xea;
            lop3.b32 $3, u, 0x00f000f0, k, 0xea;
            sub.rn.f16x2 $0, $0, l;
            sub.rn.f16x2 $1, $1, l;
            sub.rn.f16x2 $2, $2, m;
            sub.rn.f16x2 $3, $3, m;
            }
            """,
            "=&r,=&r,=&r,=&r,r", [words], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
        )  # fmt: skip
        pairs = tl.join(tl.join(u0, u1), tl.join(u2, u3))  # [B, 128, p, h]
        low = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = ((pairs >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        first = tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12))
        low, high = ((first & 15) - 8).to(tl.float16), ((first >> 16 & 15) - 8).to(tl.float16)
    both = tl.reshape(tl.join(low, high), (words.shape[0], 8, 4, 2, 2, 2, 2, 2))  # r, q, group, t % 2, p, h, w
    both = tl.reshape(tl.permute(both, (0, 1, 6, 2, 4, 5, 7, 3)), (words.shape[0] * 16, 32, 2))
    return tl.split(both)


@triton.jit
def _scales(at, d, end):
    """The scales of both groups of blocks d and d + 1, or of the last one."""
    a, b = tl.minimum(d, end - 1) * 32, tl.minimum(d + 1, end - 1) * 32
    s0, s1 = tl.load(at + a).to(tl.float32), tl.load(at + a + 1).to(tl.float32)
    return s0, s1, tl.load(at + b).to(tl.float32), tl.load(at + b + 1).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def nibble_matmul(
    x, quants, scales, y, bias, parts, arrived, rows, n, blocks,
    K: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The same with four-bit quants, whose groups have scales: each group's sums are scaled and added in float32.

    Scales are few bytes, which each step loads for the next one, from the L2 cache.
    """
    launch_next(AHEAD)
    INPUTS: tl.constexpr = (K + 63) // 64
    PART: tl.constexpr = ((INPUTS + 1) // 2 + SPLITS - 1) // SPLITS * 2
    EVEN: tl.constexpr = K % 128 == 0 and INPUTS % (2 * SPLITS) == 0
    first, split = tl.program_id(1) * (BN // 16), tl.program_id(2)
    o, b, c = tl.arange(0, BN), tl.arange(0, BN // 16), tl.arange(0, 32)
    at = quants + tl.minimum(first + b, blocks - 1).to(tl.int64)[:, None] * (INPUTS * 128) + tl.arange(0, 128)[None, :]
    scale_at = scales + tl.minimum(first + o // 16, blocks - 1).to(tl.int64) * (INPUTS * 32) + o % 16 * 2
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = c // 8 * 16 + c % 8
    xs = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * K + column[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    begin, end = split * PART, tl.minimum(split * PART + PART, INPUTS)
    if AHEAD:
        prefetch(scales + first.to(tl.int64) * (INPUTS * 32), tl.minimum(BN // 16, blocks - first) * (INPUTS * 64))
    s0, s1, s2, s3 = _scales(scale_at, begin, end)
    wait(AHEAD)
    for d in range(begin, end, 2):
        near, far = tl.load(at + d * 128), tl.load(at + tl.minimum(d + 1, end - 1) * 128)
        x0 = _tile(xs, d * 64, (d * 64 + column < K)[None, :], EVEN)
        x1 = _tile(xs, d * 64 + 8, (d * 64 + 8 + column < K)[None, :], EVEN)
        most = tl.minimum(end * 64, K)  # of a last block alone
        x2 = _tile(xs, d * 64 + 64, (d * 64 + 64 + column < most)[None, :], EVEN)
        x3 = _tile(xs, d * 64 + 72, (d * 64 + 72 + column < most)[None, :], EVEN)
        t0, t1, t2, t3 = _scales(scale_at, d + 2, end)
        w0, w1 = _nibbles(near, PACKED)
        total += tl.dot(w0, tl.trans(x0)) * s0[:, None]
        total += tl.dot(w1, tl.trans(x1)) * s1[:, None]
        w2, w3 = _nibbles(far, PACKED)
        total += tl.dot(w2, tl.trans(x2)) * s2[:, None]
        total += tl.dot(w3, tl.trans(x3)) * s3[:, None]
        s0, s1, s2, s3 = t0, t1, t2, t3
    unit = tl.where(o % 2 == 0, 1.0, 0.0625 if PACKED else 1.0)
    total = total * unit[:, None]
    total = tl.reshape(tl.permute(tl.reshape(total, (BN // 16, 8, 2, BM)), (0, 2, 1, 3)), (BN, BM))
    block = tl.minimum(first + o // 16, blocks - 1)
    if SPLITS > 1:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        own = parts + tile * (BN * BM) + o[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(own + split * tiles * (BN * BM), total)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.atomic_xchg(arrived + tile, 0)
            total = tl.load(own)
            for i in tl.static_range(1, SPLITS):
                total += tl.load(own + i * tiles * (BN * BM))
            _store(total, scales, y, bias, block, row, rows, n, False, GATED, ADD, BIAS, BY_ROW, FACTOR, SCALE)
    else:
        _store(total, scales, y, bias, block, row, rows, n, False, GATED, ADD, BIAS, BY_ROW, FACTOR, SCALE)


@triton.jit(do_not_specialize=["rows"])
def byte_matmul(
    x, quants, scales, y, bias, parts, arrived, rows, n, blocks,
    K: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    BY_ROW: tl.constexpr, FACTOR: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DEEP: tl.constexpr, SPLITS: tl.constexpr, FIRST: tl.constexpr, PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows of x, float16, times the matrix; see `quantized.matmul`.

    With SPLITS the inputs are divided among programs. The one that comes last adds the parts, in their order.
    """
    launch_next(AHEAD)
    INPUTS: tl.constexpr = (K + 63) // 64
    PART: tl.constexpr = ((INPUTS + DEEP - 1) // DEEP + SPLITS - 1) // SPLITS * DEEP
    BK: tl.constexpr = 64 * DEEP
    EVEN: tl.constexpr = K % BK == 0
    o, c, split = tl.arange(0, BN), tl.arange(0, BK), tl.program_id(2)
    # Missing blocks and rows repeat the last one; their results are not stored.
    block = tl.minimum(tl.program_id(1) * (BN // 16) + o // 16, blocks - 1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    ws = quants + (block.to(tl.int64) * INPUTS * 1024 + o % 16 * 64)[:, None] + (c // 64 * 1024 + c % 64)[None, :]
    xs = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * K + c[None, :]
    total = tl.zeros((BN, BM), tl.float32) if FIRST else tl.zeros((BM, BN), tl.float32)
    if AHEAD and SPLITS == 1:
        start = tl.program_id(1).to(tl.int64) * (BN // 16) * INPUTS * 1024
        prefetch(quants + start, tl.minimum(BN // 16, blocks - tl.program_id(1) * (BN // 16)) * INPUTS * 1024)
    wait(AHEAD)
    for d in range(split * PART, tl.minimum(split * PART + PART, INPUTS), DEEP):
        w = _floats(_tile(ws, d * 1024, (d + c // 64 < INPUTS)[None, :], EVEN), PACKED)
        v = _tile(xs, d * 64, (d * 64 + c < K)[None, :], EVEN)
        if FIRST:
            total = tl.dot(w, tl.trans(v), total)
        else:
            total = tl.dot(v, tl.trans(w), total)
    total = total if FIRST else tl.trans(total)
    if SPLITS > 1:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        own = parts + tile * (BN * BM) + o[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(own + split * tiles * (BN * BM), total)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.atomic_xchg(arrived + tile, 0)
            total = tl.load(own)
            for i in tl.static_range(1, SPLITS):
                total += tl.load(own + i * tiles * (BN * BM))
            _store(total, scales, y, bias, block, row, rows, n, True, GATED, ADD, BIAS, BY_ROW, FACTOR, SCALE)
    else:
        _store(total, scales, y, bias, block, row, rows, n, True, GATED, ADD, BIAS, BY_ROW, FACTOR, SCALE)


@triton.jit
def _store(
    total, scales, y, bias, block, row, rows, n,
    SCALED: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr,
    FACTOR: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Scales a program's sums [BN, BM], applies bias and gate, and stores them."""
    BN: tl.constexpr = total.shape[0]
    BM: tl.constexpr = total.shape[1]
    o = tl.arange(0, BN)
    total = total * FACTOR
    if SCALED:
        total = total * tl.load(scales + block * 16 + o % 16)[:, None]
    if GATED:
        # Outputs r of a block are gates and r + 8 their ups.
        gate, up = tl.split(tl.permute(tl.reshape(total, (BN // 16, 2, 8, BM)), (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (BN // 2, BM)), tl.reshape(up, (BN // 2, BM))
        where = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        if BY_ROW:
            own = bias + row.to(tl.int64)[None, :] * 2 * n + where[:, None]
            there = (where < n)[:, None] & (row < rows)[None, :]
            gate += tl.load(own, mask=there, other=0.0)
            up += tl.load(own + n, mask=there, other=0.0)
        elif BIAS:
            gate += tl.load(bias + where, mask=where < n, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + n + where, mask=where < n, other=0.0).to(tl.float32)[:, None]
        total = gate / (1.0 + tl.exp(-gate)) * up
    else:
        where = tl.program_id(1) * BN + o
        if BIAS:
            total += tl.load(bias + where, mask=where < n, other=0.0).to(tl.float32)[:, None]
    inside = (where < n)[:, None] & (row < rows)[None, :]
    place = y + row.to(tl.int64)[None, :] * n + where[:, None]
    if ADD:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (total * SCALE).to(y.dtype.element_ty), mask=inside)
