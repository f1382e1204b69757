"""How much work a call does, counted in the lines of Python it runs: the same on a busy machine and an idle one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(eq=False)
class Counted:
    lines: int = 0


@contextmanager
def lines_of(subject: type) -> Iterator[Counted]:
    """Counts the lines that this thread runs in the module of `subject`."""
    file, counted, before = sys.modules[subject.__module__].__file__, Counted(), sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        counted.lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)
