"""Matmul (GEMM) of several rows, tiled for tensor cores, with bias and gate × up in the same kernel.

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
    delta: Tensor | None = None,
    places: Tensor | None = None,
    ahead: bool = False,
) -> None:
    """x [T, K] times weight [N, K], plus bias [N], into y [T, N], which may be of a wider type.

    With `gated` the matrix is [2N, K], gate above up, and y is silu(gate) × up. `delta` [T, 2N] is added to gate and up
    first, at rows that have a use of adapters by `places` [rows] (see lora.py).
    """
    assert (delta is None) == (places is None)
    assert delta is None or gated
    (rows, k), n = x.shape, y.shape[1]
    assert x.stride(1) == y.stride(1) == weight.stride(1) == 1
    _matmul[(triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.outputs))](
        x, weight, y, x if bias is None else bias, x if delta is None else delta, x if places is None else places,
        rows, n, k, x.stride(0), weight.stride(0), y.stride(0), 0 if places is None else len(places),
        BIAS=bias is not None, DELTA=delta is not None, GATED=gated,
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


@triton.jit(do_not_specialize=["rows", "n", "placed"])
def _matmul(
    x, weight, y, bias, delta, places, rows, n, K, x_row, weight_row, y_row, placed,
    BIAS: tl.constexpr, DELTA: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
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
    if BIAS:
        total += tl.load(bias + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias + n + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
        if DELTA:
            used = tl.load(places + m, mask=m < placed, other=-1) >= 0
            at = delta + m.to(tl.int64)[:, None] * (2 * n) + o[None, :]
            there = used[:, None] & (o < n)[None, :]
            total += tl.load(at, mask=there, other=0.0).to(tl.float32)
            up += tl.load(at + n, mask=there, other=0.0).to(tl.float32)
        total = total / (1.0 + tl.exp(-total)) * up
    place = y + m.to(tl.int64)[:, None] * y_row + o[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (o < n)[None, :])
