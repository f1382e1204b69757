"""Products whose bits depend on the row alone: every row in a tile of fixed size, every sum over inputs in one order.

cuBLAS picks another kernel for another number of rows. Here a tile has the same shape whatever the number, and rows
that are not there are zeros. Many rows may take a wider tile where `wide_is_alike` has found that it gives the same
bits: its sums go the same way, but that is the device's to say.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false
# ruff: noqa: PLR0917
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.triton.launch import follow, options, wait


@dataclass(frozen=True)
class Tile:
    """Rows, outputs and inputs that a program multiplies at a time, and how it runs."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 4


WIDE = Tile(128, 128, 64, warps=8)  # of many rows in 16 bits
MANY = 256


def product(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    tile: Tile | None = None,
    ahead: bool = False,
) -> None:
    """x [T, K] times weight [N, K], plus bias [N], into y [T, N], which may be of a wider type."""
    (rows, k), n = x.shape, weight.shape[0]
    t = tile or narrow(x.dtype)
    assert x.stride(1) == y.stride(1) == weight.stride(1) == 1
    _product[(triton.cdiv(rows, t.rows), triton.cdiv(n, t.outputs))](
        x, weight, y, x if bias is None else bias, rows, n, x.stride(0), weight.stride(0), y.stride(0),
        K=k, BIAS=bias is not None, BM=t.rows, BN=t.outputs, BK=t.inputs, EVEN=k % t.inputs == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", AHEAD=ahead,
        num_warps=t.warps, num_stages=t.stages, **options(ahead),
    )  # fmt: skip


def narrow(dtype: torch.dtype) -> Tile:
    """The tile of a dtype. Of few rows most of a tile is empty, which costs nothing beside reading the weights."""
    return Tile(16, 32, 32, stages=2) if dtype == torch.float32 else Tile(64, 32, 128)


def wide_is_alike(weight: Tensor) -> bool:
    """Whether the wide tile gives rows the bits of the narrow one here, wherever they stand: tried on a real matrix."""
    if weight.dtype == torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    found = [torch.empty(200, weight.shape[0], dtype=torch.float32, device=weight.device) for _ in range(3)]
    for y, rows, tile in zip(found, (x, x, x.flip(0)), (narrow(weight.dtype), WIDE, WIDE), strict=True):
        product(rows, weight, y, tile=tile)
    return torch.equal(found[0], found[1]) and torch.equal(found[0], found[2].flip(0))


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, y, bias, rows, n, x_row, weight_row, y_row,
    K: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    follow(AHEAD)
    wait(AHEAD)
    m, o, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    xs = x + m.to(tl.int64)[:, None] * x_row + c[None, :]
    ws = weight + o.to(tl.int64)[:, None] * weight_row + c[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if EVEN:
            a = tl.load(xs + k, mask=(m < rows)[:, None], other=0.0)
            b = tl.load(ws + k, mask=(o < n)[:, None], other=0.0)
        else:
            a = tl.load(xs + k, mask=(m < rows)[:, None] & (k + c < K)[None, :], other=0.0)
            b = tl.load(ws + k, mask=(o < n)[:, None] & (k + c < K)[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + o, mask=o < n, other=0.0).to(tl.float32)[None, :]
    place = y + m.to(tl.int64)[:, None] * y_row + o[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (o < n)[None, :])
