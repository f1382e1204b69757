"""Matmul of many rows with 8-bit weights: tiles of quants become float16 on the way to the tensor cores.

The kernels of `quantized_kernels` take at most 32 rows at a time, and load them again for every 16 or 32 outputs: with
more rows that traffic takes the time. These take all of up to 64 rows for 32 to 128 outputs, and as many programs for
more rows as there are tiles. They read the same blocks: with 8 bits a block of 16 outputs by 64 inputs is row-major.
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
    """Rows, outputs and blocks of inputs per step of a program, and its launch parameters.

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
            _store(total, scales, y, bias, block, row, rows, n, GATED, ADD, BIAS, BY_ROW, FACTOR, SCALE)
    else:
        _store(total, scales, y, bias, block, row, rows, n, GATED, ADD, BIAS, BY_ROW, FACTOR, SCALE)


@triton.jit
def _store(
    total, scales, y, bias, block, row, rows, n,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BY_ROW: tl.constexpr, FACTOR: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Scales a program's sums [BN, BM], applies bias and gate, and stores them."""
    BN: tl.constexpr = total.shape[0]
    BM: tl.constexpr = total.shape[1]
    o = tl.arange(0, BN)
    total = total * FACTOR * tl.load(scales + block * 16 + o % 16)[:, None]
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
