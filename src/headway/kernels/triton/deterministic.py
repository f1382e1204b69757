"""Batch-invariant matmul: a row's bits depend on the row alone. Tiles have a fixed size, sums one order.

cuBLAS picks different kernels for different numbers of rows. Here a tile has the same shape for any number, and missing
rows are zeros. Many rows may use a wider tile if `wide_tile_is_exact` has measured that it gives the same bits on this
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.triton import matmul as tiled
from headway.kernels.triton.matmul import MatmulTile

WIDE = MatmulTile(128, 128, 64, warps=8)  # for many rows in 16 bits
MANY = 256


def matmul(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    tile: MatmulTile | None = None,
    ahead: bool = False,
) -> None:
    """x [T, K] times weight [N, K], plus bias [N], into y [T, N], which may be of a wider type."""
    tiled.matmul(x, weight, y, tile or narrow(x.dtype), bias=bias, ahead=ahead)


def narrow(dtype: torch.dtype) -> MatmulTile:
    """The tile of a dtype. With few rows most of it is empty, which costs nothing next to reading the weights."""
    return MatmulTile(16, 32, 32, stages=2) if dtype == torch.float32 else MatmulTile(64, 32, 128)


def wide_tile_is_exact(weight: Tensor) -> bool:
    """Whether the wide tile gives the same bits as the narrow one, at any row: measured on a real matrix."""
    if weight.dtype == torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    results = [torch.empty(200, weight.shape[0], dtype=torch.float32, device=weight.device) for _ in range(3)]
    for y, rows, tile in zip(results, (x, x, x.flip(0)), (narrow(weight.dtype), WIDE, WIDE), strict=True):
        matmul(rows, weight, y, tile=tile)
    return torch.equal(results[0], results[1]) and torch.equal(results[0], results[2].flip(0))
