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


def route_by_groups(
    logits: Tensor,
    count: int,
    *,
    score: str,
    groups: int,
    kept: int,
    best: int,
    correction: Tensor | None,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As `route`, from the `kept` best groups of neighboring experts: those with the highest sums of `best` scores.

    Scores are a softmax or a sigmoid of logits; a `correction` [X] is added to them where experts are chosen, not where
    they are weighted. Weights are multiplied by `scale`.
    """
    wide = logits.float()
    scores = 1 / (1 + torch.exp(-wide)) if score == "sigmoid" else wide.softmax(-1)
    ranked = scores if correction is None else scores + correction
    chosen = choose_by_groups(ranked, count, groups=groups, kept=kept, best=best)
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scale


def choose_by_groups(ranked: Tensor, count: int, *, groups: int, kept: int, best: int) -> Tensor:
    """The experts of each row [R, count] by what ranks them [R, X]."""
    if kept < groups:
        members = ranked.unflatten(-1, (groups, -1))  # [R, groups, X / groups]
        totals = _highest(members, best)[0].sum(-1)
        good = torch.zeros_like(totals, dtype=torch.bool).scatter(1, _highest(totals, kept)[1], True)
        ranked = members.masked_fill(~good[..., None], float("-inf")).flatten(1)
    return _highest(ranked, count)[1]


def _highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest of the last dimension and their places, ties to the lower."""
    ranked, places = values.sort(dim=-1, descending=True, stable=True)
    return ranked[..., :count], places[..., :count]


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
