"""Waiting for what another thread, event loop or process brings about soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 120.0  # seconds until a test gives up; nothing is asserted about times


def eventually(condition: Callable[[], T]) -> T:
    """What the condition gives once that is true."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.005)
    return found
