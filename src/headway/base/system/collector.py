"""Python's garbage collector in a process that serves: all objects are looked at when that delays nobody.

A full collection holds the GIL while it visits every object, which takes tens of milliseconds beside a large request,
and Python begins one whenever there are many new objects. In a `FullCollections` block it collects young objects only,
which takes a millisecond, until somebody calls `collect`.
"""

from __future__ import annotations

import ctypes
import gc
import threading

NEVER = 1 << 30


class FullCollections:
    """In a `with`, full collections are made by `collect` alone. Blocks may overlap; the last one ends it."""

    _lock = threading.Lock()
    _open = 0
    _before = (0, 0, 0)

    def __enter__(self) -> FullCollections:
        with self._lock:
            if FullCollections._open == 0:
                FullCollections._before = gc.get_threshold()
                gc.set_threshold(*self._before[:2], NEVER)
            FullCollections._open += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            FullCollections._open -= 1
            if FullCollections._open == 0:
                gc.set_threshold(*self._before)
                gc.unfreeze()

    def skip_loaded(self) -> None:
        """Never look at the objects that there are now, as long as a block is open: they stay."""
        gc.freeze()

    def collect(self) -> None:
        """Collect all garbage."""
        gc.collect()


def give_back_memory() -> None:
    """Give free memory of the C library's heap back to the system, where it can: one large request may have left
    hundreds of megabytes there."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # not glibc
        return
    trim(0)
