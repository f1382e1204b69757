"""LoRA, added to a matmul: for each row the sum over its adapters of scale × B (A x), in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.ordered import fma, fma_sum

PHASES = 4  # sums that the inputs of one output take turns in


class Piece(NamedTuple):
    """Two matrices, what to multiply their product with, and the first output that they add to."""

    a: Tensor  # [r, K] float32
    b: Tensor  # [n, r] float32
    factor: float  # the adapter's own scaling, where it is not in B
    first: int  # a stacked matmul has several pieces


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows under one adapter: which, and the scale at each."""

    rows: Tensor  # [R] int64
    scales: Tensor  # [R] float32


Groups = Sequence[tuple[RowGroup, Sequence[Piece]]]


Reduce = Callable[[Tensor], Tensor]


def low_rank(x: Tensor, outputs: int, groups: Groups, *, by_row: bool = False, reduce: Reduce | None = None) -> Tensor:
    """What the groups add to a matmul of x [T, K] with this many outputs [T, N], in float32, in the groups' order.

    With `by_row` every row is computed by itself, so that its bits depend on nothing else. `reduce` is applied to
    A x [R, r], which is a part of it where x has some of the inputs alone.
    """
    total = torch.zeros(len(x), outputs, dtype=torch.float32, device=x.device)
    for group, pieces in groups:
        for a, b, factor, first in pieces:
            inputs = x[group.rows].float()
            parts = inputs.split(1) if by_row else [inputs]
            inner = [part @ a.t() for part in parts]
            if reduce is not None:
                inner = reduce(torch.cat(inner)).split([len(part) for part in parts])
            delta = torch.cat([part @ b.t() for part in inner]) * (group.scales * factor)[:, None]
            total[group.rows, first : first + b.shape[0]] += delta
    return total


@dataclass(frozen=True, eq=False)
class OrderedLowRank:
    """The same for quantized weights, whose format fixes the order of every sum (`ordered`): added by `plus`.

    Inputs take turns in four sums, ranks follow each other, and the product is added to y by a fused multiply-add.
    """

    x: Tensor  # [T, K]
    groups: Groups

    def add_to(self, y: Tensor) -> Tensor:
        total = y.clone()
        for group, pieces in self.groups:
            x = self.x[group.rows]
            for a, b, factor, first in pieces:
                phases = [
                    fma_sum((len(x), len(a)), ((x[:, k, None], a[:, k]) for k in range(p, a.shape[1], PHASES)))
                    for p in range(PHASES)
                ]
                inner = (phases[0] + phases[1]) + (phases[2] + phases[3])
                outer = fma_sum((len(x), len(b)), ((inner[:, j, None], b[:, j]) for j in range(b.shape[1])))
                scales = (group.scales * torch.tensor(factor, dtype=torch.float32))[:, None]
                at = slice(first, first + len(b))
                total[group.rows, at] = fma(outer, scales, total[group.rows, at])
        return total


Delta = Tensor | OrderedLowRank


def plus(y: Tensor, delta: Delta | None) -> Tensor:
    """y, and what adapters add to it, rounded once to y's dtype."""
    if delta is None:
        return y
    return delta.add_to(y) if isinstance(delta, OrderedLowRank) else (y.float() + delta).to(y.dtype)
