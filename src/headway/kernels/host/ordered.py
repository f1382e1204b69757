"""Sums in the order that quantized formats fix: what the native step computes, to the bit (see `reference/ordered`)."""

from __future__ import annotations

import numpy as np

LANES = 16


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [R, E] scaled to unit mean square, times weight [E]."""
    e, whole = x.shape[-1], x.shape[-1] // LANES * LANES
    lanes = x[:, :whole].reshape(len(x), -1, LANES)
    total = np.zeros((len(x), LANES), np.float32)
    for part in lanes.swapaxes(0, 1).astype(np.float64):  # a product is exact in float64, and the sum rounded once
        total = (part * part + total).astype(np.float32)
    while total.shape[1] > 1:
        first, last = np.split(total, 2, 1)
        total = first + last
    for i in range(whole, e):
        total = total + x[:, i : i + 1] * x[:, i : i + 1]
    root = np.sqrt((total / np.float32(e) + np.float32(eps)).astype(np.float64)).astype(np.float32)
    return weight * (x * (np.float32(1) / root))
