"""The order of a weight's rows."""

from __future__ import annotations

from typing import Any, TypeVar

Rows = TypeVar("Rows")  # an array or a tensor


def half_split(rows: Rows, head_dim: int, rotated: int | None = None) -> Rows:
    """Rows stored for rotation of neighboring pairs, reordered for rotation of halves; of each head `rotated` rows."""
    given: Any = rows
    count = head_dim if rotated is None else rotated
    order = [*range(0, count, 2), *range(1, count, 2), *range(count, head_dim)]
    return given.reshape(-1, head_dim, *given.shape[1:])[:, order].reshape(given.shape)
