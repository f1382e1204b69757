"""Attention groups, and the attention of one row as probes read it."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.base.arrays import narrow, widen
from headway.base.dataclass import dataclass


@dataclass(frozen=True)
class ChunkWindow:
    """What a layer of chunked attention sees: a row's own chunk of `size` positions."""

    size: int


Window = int | ChunkWindow | None  # what a layer sees by position: the last n, a chunk, everything


def is_near(window: int | ChunkWindow, rows: Any, slots: Any) -> Any:
    """Whether slots at these positions lie inside the window of rows at those; both broadcast."""
    if isinstance(window, ChunkWindow):
        return rows // window.size == slots // window.size
    return rows - slots < window


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


def row_scores(
    query: np.ndarray,
    keys: np.ndarray,
    group: AttentionGroup,
    *,
    cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention probabilities [H, S] of one row, S in absolute slots: its query [H, D], which is scaled already, over
    keys [P, page, Hkv, D]. A `cap` bounds scores softly; `sinks` [H] are scores of a slot of zeros."""
    page, heads, dim = keys.shape[1:]
    seen = group.mask[0, 0]  # [P * page]
    query = widen(narrow(query, "bfloat16")) if keys.dtype == np.uint16 else query  # as the native step rounds it
    own = widen(keys[group.pages[0]]).reshape(-1, heads, dim)[seen]  # [seen, Hkv, D]
    raw = (query.reshape(heads, -1, dim) @ own.transpose(1, 2, 0)).reshape(len(query), -1)  # [H, seen]
    raw = raw if cap is None else np.tanh(raw / np.float32(cap)) * np.float32(cap)
    most = raw.max(-1, keepdims=True) if sinks is None else np.maximum(raw.max(-1, keepdims=True), sinks[:, None])
    weights = np.exp(raw - most)
    total = weights.sum(-1, keepdims=True)
    total = total if sinks is None else total + np.exp(sinks[:, None] - most)
    places = (group.numbers[0][:, None] * page + np.arange(page)).ravel()[seen]
    out = np.zeros((len(query), int(places[-1]) + 1), np.float32)
    out[:, places] = weights / total
    return out
