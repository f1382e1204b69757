"""Pause the garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection for a `with`: imports and loading create no garbage, and once torch is imported every
    full collection takes some 50 ms. Safe when threads overlap: it is enabled again at the end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
