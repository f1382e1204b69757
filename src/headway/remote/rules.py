"""`Mask.rule` over a connection: its function runs here, and the rows that it gives travel as runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.base.errors import InvalidInput
from headway.base.specs.mask_rules import Function, RowPlace, attended, leaves
from headway.base.specs.masks import Mask
from headway.remote.protocol.values import mask_json

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

MOST_BITS = 1 << 27  # rows × slots that are computed ahead


def bound_mask(mask: Mask, positions: Sequence[int], first: int, rows: int, total: int | None = None) -> list[Any]:
    """A mask for the `rows` tokens from slot `first` on, of which `positions` has the position ids of all slots.

    With `total`, rows from that slot on see all slots (`causal=False`).
    """
    if rows * len(positions) > MOST_BITS:
        raise InvalidInput(
            f"a rule over {rows} rows of {len(positions)} slots would be computed here for each of them; over a "
            "connection use Mask.window, sink or blocks, or fewer tokens"
        )
    at = np.asarray(positions, np.int64)
    places = [_place(row, rows, first, at, total) for row in range(rows)]
    by_length: dict[int, list[Any]] = {}
    for leaf in leaves(mask.tree):
        if isinstance(leaf, Function) and id(leaf.fn) not in by_length:
            by_length[id(leaf.fn)] = [[int(at[place.slot]), list(attended(leaf, place).runs)] for place in places]
    return mask_json(mask, by_length)


def _place(row: int, rows: int, first: int, at: np.ndarray, total: int | None) -> RowPlace:
    causal = total is None or first + row < total
    return RowPlace(row, rows, first, first + row + 1 if causal else len(at), causal, positions=at)
