"""Products whose bits depend on the row alone: every row in a tile of fixed size, every sum over inputs in one order.

cuBLAS picks another kernel for another number of rows. Here a tile has the same shape whatever the number, and rows
that are not there are zeros. Many rows may take a wider tile where `wide_is_alike` has found that it gives the same
bits: its sums go the same way, but that is the device's to say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.triton import matmul as tiles
from headway.kernels.triton.matmul import Tile

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
    tiles.product(x, weight, y, tile or narrow(x.dtype), bias=bias, ahead=ahead)


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
