"""Sums in the order that quantized formats fix: what the native step computes, to the bit (see `reference/ordered`)."""

from __future__ import annotations

import numpy as np

LANES = 16


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """x [R, E] minus its mean, scaled to unit variance, times weight [E], plus bias [E]."""
    e = np.float32(x.shape[-1])
    centered = x - (_lane_sum(x, None) / e)
    factor = np.float32(1) / _root(_lane_sum(centered, centered) / e + np.float32(eps))
    y = weight * (centered * factor)
    return y if bias is None else y + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [R, E] scaled to unit mean square, times weight [E]."""
    root = _root(_lane_sum(x, x) / np.float32(x.shape[-1]) + np.float32(eps))
    return weight * (x * (np.float32(1) / root))


def _root(x: np.ndarray) -> np.ndarray:
    return np.sqrt(x.astype(np.float64)).astype(np.float32)


def _lane_sum(x: np.ndarray, by: np.ndarray | None) -> np.ndarray:
    """The sum of x [R, E], or of x × by, in 16 lanes → [R, 1]; a product and its sum are rounded once."""
    e, whole = x.shape[-1], x.shape[-1] // LANES * LANES
    other = np.ones_like(x) if by is None else by
    total = np.zeros((len(x), LANES), np.float32)
    lanes = (part[:, :whole].reshape(len(x), -1, LANES).swapaxes(0, 1).astype(np.float64) for part in (x, other))
    for a, b in zip(*lanes, strict=True):  # a product is exact in float64
        total = (a * b + total).astype(np.float32)
    while total.shape[1] > 1:
        first, last = np.split(total, 2, 1)
        total = first + last
    for i in range(whole, e):
        total = total + x[:, i : i + 1] * other[:, i : i + 1]
    return total
