"""How long Python lets one thread run before another may."""

from __future__ import annotations

import sys

WHILE_IN_FLIGHT = 0.00005  # seconds that a program may keep the interpreter while a step is in flight


class SwitchInterval:
    """Short while a step is in flight: the device must not wait for the worker while programs take tokens.

    Otherwise it is as it was, so that programs may queue many passes first.
    """

    def __init__(self) -> None:
        self._before: float | None = None  # Python's own, while it is ours

    def set(self, *, in_flight: bool) -> None:
        """Shorten or restore it, where that is a change."""
        if in_flight == (self._before is not None):
            return
        if self._before is None:
            self._before = sys.getswitchinterval()
            sys.setswitchinterval(min(self._before, WHILE_IN_FLIGHT))
        else:
            sys.setswitchinterval(self._before)
            self._before = None
