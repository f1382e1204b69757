"""Triton's interpreter, with dots whose rows do not know each other.

It multiplies tiles by numpy's BLAS, which on some CPUs sums a row in another order at another place of the tile. A
device does not, and that a row's bits depend on the row alone is what several tests are about.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


class _Arrays:
    """numpy as the interpreter sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        """Every number of the product is summed by itself, in the order of the inputs."""
        return np.einsum("...mk,...kn->...mn", a, b, dtype=dtype)


def steady_dots() -> None:
    """Make the interpreter multiply like that, if somebody has imported it."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and interpreter.np is np:
        interpreter.np = _Arrays()
