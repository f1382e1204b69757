"""The rows of a batch by adapter, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headway.base.specs.adapters import AdapterMix
from headway.runtime.adapters import LoadedAdapter


class AdapterRows(NamedTuple):
    """Rows of a batch under one adapter, and its scale at each."""

    adapter: LoadedAdapter
    rows: list[int]
    scales: list[float]


def by_adapter(mixes: Sequence[AdapterMix | None]) -> list[AdapterRows]:
    """The rows of each adapter, adapters in the order of their hashes: a row's sum has the same order in any batch."""
    groups: dict[str, AdapterRows] = {}
    for row, mix in enumerate(mixes):
        for adapter, scale in () if mix is None else mix.uses:
            assert isinstance(adapter, LoadedAdapter)
            group = groups.setdefault(adapter.digest, AdapterRows(adapter, [], []))
            group.rows.append(row)
            group.scales.append(scale)
    return [group for _, group in sorted(groups.items())]


def has_head(mixes: Sequence[AdapterMix | None]) -> bool:
    """Whether an adapter of these changes the output matrix."""
    uses = (use for mix in mixes if mix is not None for use, _ in mix.uses)
    return any(isinstance(use, LoadedAdapter) and use.head is not None for use in uses)


def add_to_products(products: np.ndarray, h: np.ndarray, mixes: Sequence[AdapterMix | None]) -> None:
    """Add what adapters of the head make of normed rows h [R, E] to its products [R, V], in place.

    Every row is computed by itself, so that its bits depend on nothing else.
    """
    for adapter, rows, scales in by_adapter(mixes):
        if (head := adapter.head) is not None:
            for row, scale in zip(rows, scales, strict=True):
                products[row] += (head.b @ (head.a @ h[row])) * np.float32(scale * head.factor)
