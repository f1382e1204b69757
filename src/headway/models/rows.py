"""The order of a weight's rows."""

from __future__ import annotations

from typing import Any, TypeVar

Rows = TypeVar("Rows")  # an array or a tensor


def half_split(rows: Rows, head_dim: int) -> Rows:
    """Rows stored for rotation of neighboring pairs, reordered for rotation of halves."""
    given: Any = rows
    heads = given.reshape(-1, head_dim // 2, 2, *given.shape[1:])
    return heads.swapaxes(1, 2).reshape(given.shape)
