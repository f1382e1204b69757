"""LoRA beside a matmul: for each row the sum over its adapters of scale × B (A x), in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Two matrices, and the first output that they add to: a stacked matmul has several."""

    a: Tensor  # [r, K] float32
    b: Tensor  # [n, r] float32, the adapter's own scaling included
    first: int


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows under one adapter: which, and the scale at each."""

    rows: Tensor  # [R] int64
    scales: Tensor  # [R] float32


def low_rank(
    x: Tensor, outputs: int, groups: Sequence[tuple[RowGroup, Sequence[Piece]]], *, by_row: bool = False
) -> Tensor:
    """What the groups add to a matmul of x [T, K] with so many outputs [T, N], in float32, in the groups' order.

    With `by_row` every row is computed by itself, so that its bits depend on nothing else.
    """
    total = torch.zeros(len(x), outputs, dtype=torch.float32, device=x.device)
    for group, pieces in groups:
        for a, b, first in pieces:
            inputs = x[group.rows].float()
            parts = inputs.split(1) if by_row else [inputs]
            delta = torch.cat([(part @ a.t()) @ b.t() for part in parts]) * group.scales[:, None]
            total[group.rows, first : first + b.shape[0]] += delta
    return total


def plus(y: Tensor, delta: Tensor | None) -> Tensor:
    """y, and what `low_rank` adds to it, rounded once to y's dtype."""
    return y if delta is None else (y.float() + delta).to(y.dtype)
