"""No garbage collection while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Hold the collector back for a moment: what is imported or loaded is no garbage, and after torch is imported
    every full look at what there is takes some 50 ms. In whatever order threads do this, it is on again at the end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
