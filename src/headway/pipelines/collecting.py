"""The garbage collector held back while streams feed a GPU.

An item on its way is ten small objects that live for thousands of items and die without help. Python takes so many
survivors for a reason to walk through all that is loaded, a few times a second, which costs more than the work itself.
Garbage is still collected, only more rarely; the thresholds are as before when the last stream is over.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 100_000  # objects more than were freed, at which the collector looks
_lock = threading.Lock()
_streams = 0
_before: tuple[int, int, int] = (0, 0, 0)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Within it, on all threads, the collector looks at YOUNG new objects; one that is off or as rare is left alone."""
    global _streams, _before  # noqa: PLW0603  (the collector is the process's)
    with _lock:
        if _streams == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < YOUNG:
                gc.set_threshold(YOUNG, *_before[1:])
        _streams += 1
    try:
        yield
    finally:
        with _lock:
            _streams -= 1
            if _streams == 0 and gc.get_threshold()[0] == YOUNG and 0 < _before[0] < YOUNG:
                gc.set_threshold(*_before)
