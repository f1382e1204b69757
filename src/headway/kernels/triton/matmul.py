"""Matmul (GEMM) of several rows, tiled for tensor cores, with adapters, bias and gate × up in the same kernel.

With MOST rows, reading the matrix takes the time, and cuBLAS leaves bandwidth unused between two kernels. These kernels
start before the previous one has ended, with as many loads in flight as fit. For fewer rows cuBLAS has smaller tiles.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.triton.launch import launch_next, options, wait
from headway.kernels.triton.lora import (
    DTYPES,
    MATRICES,
    PIECES,
    RANKS,
    TILES,
    LowRank,
    add_low_rank,
    splits,
)

LEAST, MOST = 33, 64  # numbers of rows for which this is faster than cuBLAS


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
    low_rank: LowRank | None = None,
    ahead: bool = False,
) -> None:
    """x [T, K] times weight [N, K], plus bias [N], into y [T, N], which may be of a wider type.

    With `gated` the matrix is [2N, K], gate above up, and y is silu(gate) × up. With `low_rank`, whose sums `shrink`
    has computed, the adapters' part is added, in 16 bits; `takes_adapters` says for which tiles.
    """
    (rows, k), n = x.shape, y.shape[1]
    assert x.stride(1) == y.stride(1) == weight.stride(1) == 1
    added, how = (x,) * 7, None
    sizes, first, wide, layer, layers = [n, 0, 0], 0, RANKS, 0, 1
    if low_rank is not None:
        table, how = low_rank.table, low_rank.tiles
        added = table.pointers, table.ranks, table.factors, how.tiles, how.places, how.scales, low_rank.sums
        sizes, first, wide = low_rank.sizes, low_rank.first, how.blocks * RANKS
        layer, layers = low_rank.layer, table.ranks.shape[1]
    _matmul[(triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.outputs))](
        x, weight, y, x if bias is None else bias, *added, rows, n, k, x.stride(0), weight.stride(0), y.stride(0),
        0 if how is None else len(how.tiles), 0 if how is None else len(how.places), layer, layers,
        LOW_RANK=how is not None, N0=sizes[0], N1=sizes[1], FIRST=first, WIDE=wide,
        KIND=DTYPES[x.dtype if low_rank is None else low_rank.table.dtype],
        RANKS=RANKS, TILES=TILES, SPLITS=splits(k), PIECES=PIECES, MATRICES=MATRICES,
        BIAS=bias is not None, GATED=gated, FULL=rows % tile.rows == 0 and n % tile.outputs == 0,
        BM=tile.rows, BN=tile.outputs, BK=tile.inputs, EVEN=k % tile.inputs == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", AHEAD=ahead,
        num_warps=tile.warps, num_stages=tile.stages, **options(ahead),
    )  # fmt: skip


def takes_adapters(tile: MatmulTile, outputs: tuple[int, ...]) -> bool:
    """Whether no block of outputs lies in two pieces of the matrix."""
    return all(n % tile.outputs == 0 for n in outputs)


def pick_tile(n: int, gated: bool, shared_memory: int) -> MatmulTile:
    """The fastest tile on an H200 for MOST rows and `n` outputs, in 16 bits.

    `shared_memory` is what a program may use, in bytes; a smaller device gets fewer stages.
    """
    if gated:
        tile = MatmulTile(MOST, 128, 64)
    elif n > 32768:
        tile = MatmulTile(MOST, 128, 128)
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


@triton.jit(do_not_specialize=["rows", "n", "tile_count", "placed", "layer"])
def _matmul(
    x, weight, y, bias, pointers, ranks, factors, tiles, places, scales, sums,
    rows, n, K, x_row, weight_row, y_row, tile_count, placed, layer, layers,
    LOW_RANK: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, RANKS: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr,
    MATRICES: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FULL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    launch_next(AHEAD)
    wait(AHEAD)
    m, o, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    xs = x + m.to(tl.int64)[:, None] * x_row + c[None, :]
    ws = weight + o.to(tl.int64)[:, None] * weight_row + c[None, :]
    us = ws + n.to(tl.int64) * weight_row
    total = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = _part(xs, k, m < rows, c, K, FULL, EVEN)
        b = _part(ws, k, o < n, c, K, FULL, EVEN)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        if GATED:
            b = _part(us, k, o < n, c, K, FULL, EVEN)
            up = tl.dot(a, tl.trans(b), up, input_precision=PRECISION)
    if LOW_RANK:
        begin = tl.program_id(1) * BN
        piece = 0 if GATED else (begin >= N0).to(tl.int32) + (begin >= N0 + N1).to(tl.int32)
        inner = o - (0 if GATED else tl.where(piece == 0, 0, tl.where(piece == 1, N0, N0 + N1)))
        total = add_low_rank(
            total, m, inner, piece, pointers, ranks, factors, tiles, tile_count, places, placed, scales, sums, layer,
            layers, FIRST, WIDE, KIND, PRECISION, RANKS, TILES, SPLITS, PIECES, MATRICES, BM,
        )  # fmt: skip
        if GATED:
            up = add_low_rank(
                up, m, inner, 1, pointers, ranks, factors, tiles, tile_count, places, placed, scales, sums, layer,
                layers, FIRST, WIDE, KIND, PRECISION, RANKS, TILES, SPLITS, PIECES, MATRICES, BM,
            )  # fmt: skip
    if BIAS:
        total += tl.load(bias + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias + n + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
        total = total / (1.0 + tl.exp(-total)) * up
    place = y + m.to(tl.int64)[:, None] * y_row + o[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (o < n)[None, :])
