"""Experts: which of them a row goes to, and a matmul of rows grouped by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.reference.linear import by_rows, linear


def route(logits: Tensor, count: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights: logits [R, X] → two [R, count], the highest first, ties to the lower.

    Weights are probabilities over all experts; with `normalize` those of the chosen ones sum to 1.
    """
    wide = logits.float()
    ranked, ids = wide.sort(dim=-1, descending=True, stable=True)
    chosen = ids[:, :count]
    if normalize:
        return chosen, ranked[:, :count].softmax(-1)
    return chosen, wide.softmax(-1).gather(1, chosen)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int], tile: int | None) -> Tensor:
    """Rows x [N, K] in the order of their experts, `counts` of each, by weight [X, M, K] and bias [X, M] → [N, M].

    One matmul for each expert that has rows, with a tile always of that many.
    """
    out = torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
    start = 0
    for i, count in enumerate(counts):
        if count:
            rows, own = slice(start, start + count), None if bias is None else bias[i]
            (out[rows],) = by_rows(tile, lambda r, i=i, own=own: (linear(r, weight[i], own),), x[rows])
            start += count
    return out
