"""A bias for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np


class DenseBias:
    """A bias for every token, as a value: equal where its numbers are."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DenseBias) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"<bias of {self.array.size} tokens>"
