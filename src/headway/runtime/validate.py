"""Comparing two ways of computing the same token: per layer and at the logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import ValidationFailed

# Rows in fp8 have four bits: a sum's last bit may move a number to the next one, and in a few layers such differences
# grow to about what the rounding itself makes, 0.1 of a layer's largest value.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2, "fp8": 0.25}


@dataclass(frozen=True, eq=False)
class Trace:
    """One token's way through the model: the output of each layer [E], and its logits [V]."""

    layers: Sequence[np.ndarray]
    logits: np.ndarray


@dataclass(frozen=True)
class Diagnostic:
    """How far two traces lie apart, each difference relative to max(1, largest value)."""

    position: int
    layers: tuple[float, ...]
    logits: float
    tolerance: float

    @property
    def first_bad_layer(self) -> int | None:
        return next((l for l, d in enumerate(self.layers) if not d <= self.tolerance), None)

    @property
    def passed(self) -> bool:
        return self.first_bad_layer is None and self.logits <= self.tolerance

    def check(self, first: str, second: str) -> None:
        """Raise when the two differ past tolerance, naming the first layer that does."""
        if self.passed:
            return
        layer = self.first_bad_layer
        where = "the logits" if layer is None else f"layer {layer}"
        distance = self.logits if layer is None else self.layers[layer]
        raise ValidationFailed(
            f"{first} and {second} differ at position {self.position}: {where} first, by {distance:.3g} "
            f"where {self.tolerance:.3g} is allowed (logits differ by {self.logits:.3g})"
        )


def compare(position: int, one: Trace, other: Trace, dtype: str) -> Diagnostic:
    """The distances between two traces of the same token."""
    layers = tuple(_distance(a, b) for a, b in zip(one.layers, other.layers, strict=True))
    return Diagnostic(position, layers, _distance(one.logits, other.logits), TOLERANCES[dtype])


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(1.0, float(np.abs(b).max())))
