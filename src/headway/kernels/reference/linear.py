"""Matmul with weights, and the fixed row tiles that make a row's bits independent of its neighbors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, K] times weight [N, K], plus bias [N] → [R, N]."""
    return F.linear(x, weight, bias)


def by_rows(tile: int | None, fn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """fn(*inputs) for a function that treats every row (dim 0) alike.

    With a tile, fn always gets exactly `tile` rows (the last tile is padded with zeros), so that the shapes, and with
    them the order of every sum, are the same whether a row comes alone or among hundreds.
    """
    rows = inputs[0].shape[0]
    if tile is None or rows == 0:
        return fn(*inputs)
    parts = [fn(*(_tile(x, start, tile) for x in inputs)) for start in range(0, rows, tile)]
    return tuple(torch.cat(column)[:rows] for column in zip(*parts, strict=True))


def _tile(x: Tensor, start: int, tile: int) -> Tensor:
    part = x[start : start + tile]
    whole = torch.zeros((tile, *x.shape[1:]), dtype=x.dtype, device=x.device)
    whole[: part.shape[0]] = part
    return whole
