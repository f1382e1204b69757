"""Attention groups, and the attention of one row as probes read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.base.arrays import widen


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """N sequences with M rows each that share one attention call. Arrays, or tensors for torch.

    rows [N, M] are rows of the step; pages [N, P] are physical pages, in slot order (page 0 where a sequence has
    fewer); numbers [N, P] is each page's place in its sequence (-1 for filler); mask [N, M, P * page] says what a row
    attends to.
    """

    rows: Any
    pages: Any
    numbers: Any
    mask: Any


def row_scores(query: np.ndarray, keys: np.ndarray, group: AttentionGroup) -> np.ndarray:
    """Attention probabilities [H, S] of one row, S in absolute slots: its query [H, D], which is scaled already, over
    keys [P, page, Hkv, D]."""
    page, heads, dim = keys.shape[1:]
    seen = group.mask[0, 0]  # [P * page]
    own = widen(keys[group.pages[0]]).reshape(-1, heads, dim)[seen]  # [seen, Hkv, D]
    raw = (query.reshape(heads, -1, dim) @ own.transpose(1, 2, 0)).reshape(len(query), -1)  # [H, seen]
    weights = np.exp(raw - raw.max(-1, keepdims=True))
    places = (group.numbers[0][:, None] * page + np.arange(page)).ravel()[seen]
    out = np.zeros((len(query), int(places[-1]) + 1), np.float32)
    out[:, places] = weights / weights.sum(-1, keepdims=True)
    return out
