"""Parameters of which the default suite takes the first ones and `make test-all` takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def swept(values: Iterable[Any], default: int = 1) -> list[Any]:
    """The values as parameters; those after the first `default` are slow."""
    return [value if i < default else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]
