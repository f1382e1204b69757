"""How long Python lets one thread run before another may. Nothing else here sets it."""

from __future__ import annotations

import sys
import threading

WHILE_IN_FLIGHT = 0.00005  # seconds that a program may keep the interpreter while a step is in flight
WHILE_SERVING = 0.0005  # that a large request may keep it from the event loop and from the engine


class SwitchInterval:
    """Asks for an interval while it is on. The shortest of those that are on holds; Python's own comes back after them.

    One that is on already stays on. It may be turned on and off from any thread, or be used in a `with`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._is_on = seconds, False

    def set(self, *, on: bool) -> None:
        """Turn it on or off, where that is a change."""
        if on != self._is_on:
            self._is_on = on
            _ASKED.change(self._seconds, on=on)

    def __enter__(self) -> SwitchInterval:
        self.set(on=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.set(on=False)


class _AskedIntervals:
    """All intervals of this process that are asked for now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: list[float] = []
        self._usual = sys.getswitchinterval()  # while nobody asks

    def change(self, seconds: float, *, on: bool) -> None:
        with self._lock:
            if not self._seconds:
                self._usual = sys.getswitchinterval()
            (self._seconds.append if on else self._seconds.remove)(seconds)
            sys.setswitchinterval(min([self._usual, *self._seconds]))


_ASKED = _AskedIntervals()
