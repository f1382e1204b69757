"""Matmul (GEMM) of several rows, tiled for tensor cores, with bias and gate × up in the same kernel, or with the first
half of LoRA adapters: their A are more outputs of the same rows, which programs of their own compute beside the others.

With MOST rows, reading the matrix takes the time, and cuBLAS leaves bandwidth unused between two kernels. These kernels
start before the previous one has ended, with as many loads in flight as fit. For fewer rows cuBLAS has smaller tiles.
"""

# ruff: noqa: PLR0917, SIM102 (a constant condition of its own leaves the code out)
from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.adapters.lora import MATRICES, PIECES, RANKS, LowRankTerm
from headway.kernels.triton.launch import launch_next, options, wait

LEAST, MOST = 33, 64  # numbers of rows for which this is faster than cuBLAS
FEW = 16  # numbers of rows up to this one, more than one, for which gate × up is


@dataclass(frozen=True)
class MatmulTile:
    """Rows, outputs and inputs per step of a program, and its launch parameters."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 4


def matmul(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    tile: MatmulTile,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    shrinks: LowRankTerm | None = None,
    ahead: bool = False,
) -> None:
    """x [T, K] times weight [N, K], plus bias [N], into y [T, N], which may be of a wider type.

    With `gated` the matrix is [2N, K], gate above up, and y is silu(gate) × up. `shrinks` are adapters whose A x goes
    into their sums, in one part (see lora.py); T is then at most the rows of one tile.
    """
    (rows, k), n = x.shape, y.shape[1]
    assert x.stride(1) == y.stride(1) == weight.stride(1) == 1
    blocks = triton.cdiv(n, tile.outputs)
    adapters: tuple[object, ...] = (x,) * 5 + (0,) * 4
    first = wide = 0
    if shrinks is not None:
        table, uses, first, wide = shrinks.table, shrinks.tiles, shrinks.first, shrinks.tiles.blocks * RANKS
        assert not gated
        assert rows <= tile.rows
        assert table.dtype == weight.dtype == x.dtype
        blocks += triton.cdiv(len(shrinks.outputs) * len(uses.tiles) * wide, tile.outputs)
        tensors = table.pointers, table.ranks, uses.tiles, uses.places, shrinks.sums
        adapters = (*tensors, shrinks.layer, table.ranks.shape[1], len(uses.tiles), len(uses.places))
    _matmul[(triton.cdiv(rows, tile.rows), blocks)](
        x, weight, y, x if bias is None else bias, *adapters, rows, n, k, x.stride(0), weight.stride(0), y.stride(0),
        BIAS=bias is not None, GATED=gated, FIRST=first, USED=len(shrinks.outputs) if shrinks is not None else 0,
        WIDE=wide, RANKS=RANKS, PIECES=PIECES, MATRICES=MATRICES,
        ALIGNED=all(size * x.element_size() % 16 == 0 for size in (k, weight.stride(0))),
        FULL=rows % tile.rows == 0 and n % tile.outputs == 0, EVEN=k % tile.inputs == 0,
        BM=tile.rows, BN=tile.outputs, BK=tile.inputs,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", AHEAD=ahead,
        num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
    )  # fmt: skip


def pick_tile(rows: int, n: int, gated: bool, shared_memory: int) -> MatmulTile:
    """The fastest tile on an H200 for MOST rows, or FEW that are gated, and `n` outputs, in 16 bits.

    `shared_memory` is what a program may use, in bytes; a smaller device gets fewer stages.
    """
    if gated:
        tile = MatmulTile(MOST, 64, 128, stages=2) if rows > FEW else MatmulTile(FEW, 32, 256, stages=3)
    elif n > 8192:  # up to 32,768 outputs two programs share a multiprocessor, and all run at once
        tile = MatmulTile(MOST, 128, 128, stages=4 if n > 32768 else 2)
    else:
        tile = MatmulTile(MOST, 64, 64, stages=8) if n > 4096 else MatmulTile(MOST, 32, 128, stages=8)
    stage = 2 * tile.inputs * (tile.rows + tile.outputs * (2 if gated else 1))
    return replace(tile, stages=max(1, min(tile.stages, shared_memory // stage)))


@triton.jit
def _part(at, k, there, c, K, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Inputs from k on, zeros for missing rows. Loads without masks are faster."""
    if FULL and EVEN:
        return tl.load(at + k)
    return tl.load(at + k, mask=there[:, None] & (k + c < K)[None, :], other=0.0)


@triton.jit
def _adapter_columns(
    j, pointers, ranks, tiles, layer, layers, tile_count,
    FIRST: tl.constexpr, USED: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    """Of output j beyond the matrix: its piece, its rank, the first use and the end of its tile, where its A lies, and
    whether there is one."""
    r, tile, piece = j % WIDE, j // WIDE % tile_count, j // WIDE // tile_count
    there = piece < USED
    slot = tl.load(tiles + tile * 3, mask=there, other=0)
    start, count = (
        tl.load(tiles + tile * 3 + 1, mask=there, other=0),
        tl.load(tiles + tile * 3 + 2, mask=there, other=0),
    )
    matrix = (slot.to(tl.int64) * layers + layer) * MATRICES + FIRST + piece
    rank = tl.load(ranks + matrix, mask=there, other=0)
    there = there & (count > 0) & (r < (rank + RANKS - 1) // RANKS * RANKS)
    return piece, r, start, start + count, tl.load(pointers + matrix * 2, mask=there, other=0), there


@triton.jit(do_not_specialize=["rows", "n", "layer", "tile_count", "placed"])
def _matmul(
    x, weight, y, bias, pointers, ranks, tiles, places, sums, layer, layers, tile_count, placed,
    rows, n, K, x_row, weight_row, y_row,
    BIAS: tl.constexpr, GATED: tl.constexpr, FIRST: tl.constexpr, USED: tl.constexpr, WIDE: tl.constexpr,
    RANKS: tl.constexpr, PIECES: tl.constexpr, MATRICES: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    m, o, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    xs = x + m.to(tl.int64)[:, None] * x_row + c[None, :]
    begin = tl.cdiv(n, BN) * BN  # of the outputs of adapters
    if USED:
        address = (weight + o.to(tl.int64) * weight_row).to(tl.int64)
        if tl.program_id(1) * BN >= begin:
            _, r, _, _, a, there = _adapter_columns(
                o - begin, pointers, ranks, tiles, layer, layers, tile_count, FIRST, USED, WIDE, RANKS, MATRICES
            )
            size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
            address = tl.where(there, a + r.to(tl.int64) * K * size, weight.to(tl.int64))  # else any row: it is unused
        at = address.to(tl.pointer_type(weight.dtype.element_ty))
        if ALIGNED:
            at = tl.multiple_of(at, 16)
        ws = at[:, None] + c[None, :]
    else:
        ws = weight + o.to(tl.int64)[:, None] * weight_row + c[None, :]
    us = ws + n.to(tl.int64) * weight_row
    total = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    wait(AHEAD)
    for k in range(0, K, BK):
        a = _part(xs, k, m < rows, c, K, FULL, EVEN)
        b = _part(ws, k, (o < n) | (o >= begin) if USED else o < n, c, K, FULL, EVEN)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        if GATED:
            b = _part(us, k, o < n, c, K, FULL, EVEN)
            up = tl.dot(a, tl.trans(b), up, input_precision=PRECISION)
    if USED:
        if tl.program_id(1) * BN >= begin:
            piece, r, first, last, _, there = _adapter_columns(
                o - begin, pointers, ranks, tiles, layer, layers, tile_count, FIRST, USED, WIDE, RANKS, MATRICES
            )
            use = tl.load(places + m, mask=m < placed, other=-1)[:, None]
            there = there[None, :] & (use >= first[None, :]) & (use < last[None, :])
            tl.store(sums + (use * PIECES + piece[None, :]) * WIDE + r[None, :], total, mask=there)
    if BIAS:
        total += tl.load(bias + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias + n + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
        total = total / (1.0 + tl.exp(-total)) * up
    place = y + m.to(tl.int64)[:, None] * y_row + o[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (o < n)[None, :])
