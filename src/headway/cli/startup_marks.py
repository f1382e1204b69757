"""When the phases of a start are over: `headway bench startup` names a file, and the command adds a line for each."""

from __future__ import annotations

import time

from headway.base.config import settings


def mark(phase: str) -> None:
    """Note that a phase is over, if anybody asked."""
    if (file := settings().startup_marks) is not None:
        with open(file, "a", encoding="utf-8") as marks:
            marks.write(f"{phase} {time.monotonic()}\n")
