"""The lock of the loop's bookkeeping: held for pure work, and never waited for by a thread that others wait for.

A program's own constraint is followed in a thread of the engine's, for which a program may have to wait while it holds
this lock. What such a thread asks of the engine is refused where it would have to wait; the program's own thread then
asks again.
"""

from __future__ import annotations

import _thread
import threading

from headway.base.errors import HeadwayError

_here = threading.local()


class WouldWait(HeadwayError):
    """A thread that never waits would have had to."""


def never_wait() -> None:
    """Have nothing of the engine's keep the current thread, from now on."""
    _here.never_waits = True


def check_may_wait() -> None:
    """Raise in a thread that never waits."""
    if hasattr(_here, "never_waits"):
        raise WouldWait(
            "a constraint that is followed ahead of its program cannot wait for the engine; its program asks it again. "
            "in_program = True has it asked there alone"
        )


class BookkeepingLock(_thread.RLock):  # pyright: ignore[reportGeneralTypeIssues]: CPython lets one
    """A reentrant lock."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if super().acquire(False):
            return True
        if not blocking:
            return False
        check_may_wait()
        return super().acquire(True, timeout)

    __enter__ = acquire
