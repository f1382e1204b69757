"""Parameters of which the default suite takes the first ones and `make test-all` takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def swept(values: Iterable[Any], default: int = 1) -> list[Any]:
    """The values as parameters; those after the first `default` are slow."""
    return [value if i < default else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


def instruction_sets() -> list[Any]:
    """Those of the native library. The plainest and the best of this machine are quick tests, the others are slow."""
    from headway.kernels.native.library import ISAS, open_library

    calls = open_library().calls
    best = ISAS[-1] if calls is None else ISAS[calls.hw_best_isa()]
    first = list(dict.fromkeys((ISAS[0], best)))
    return swept([*first, *(isa for isa in ISAS if isa not in first)], len(first))
