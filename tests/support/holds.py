"""How long one piece of work keeps everybody else of this process from running: by the CPU time of its thread.

A thread keeps others away while it holds the interpreter lock, and the event loop keeps every client away while one of
its callbacks runs. `HoldMeter` wants that lock often, and notes the CPU time that every thread had until it got it; and
it notes the CPU time of every callback. That does not depend on what else the machine does, as long as this thread gets
to run at all: take the best of several.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from types import TracebackType

LOOK = 0.0003  # seconds between two looks
COPIED = 64 << 20


def copy_seconds() -> float:
    """The CPU seconds of a copy of 64 MiB: what times are compared with. The best of several."""
    source, best = bytes(COPIED), 1e9
    for _ in range(5):
        began = time.thread_time()
        bytearray(source)
        best = min(best, time.thread_time() - began)
    return best


class HoldMeter:
    """The longest hold in a `with`, in CPU seconds, and where. The thread that enters, a client, is left out."""

    def __init__(self) -> None:
        self.longest, self.where = 0.0, ""
        self._client = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="holds")
        self._run_handle = asyncio.Handle._run

    def __enter__(self) -> HoldMeter:
        run = self._run_handle

        note = self._note

        def timed(self: asyncio.Handle) -> None:
            work, began = self._callback, time.thread_time()
            run(self)
            note(time.thread_time() - began, f"a callback of {type(work)}")

        asyncio.Handle._run = timed
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.Handle._run = self._run_handle
        self._ended.set()
        self._thread.join()

    def _note(self, seconds: float, where: str) -> None:
        if seconds > self.longest:
            self.longest, self.where = seconds, where

    def _look(self) -> None:
        before: dict[int, float] = {}
        left_out = {self._client, threading.get_ident()}
        while not self._ended.is_set():
            time.sleep(LOOK)
            frames = sys._current_frames()
            now = {thread: _cpu_seconds(thread) for thread in frames.keys() - left_out}
            for thread, seconds in now.items():
                if (held := seconds - before.get(thread, seconds)) > self.longest:
                    self._note(held, "".join(traceback.format_stack(frames[thread], limit=6)))
            before = now


def _cpu_seconds(thread: int) -> float:
    """The CPU time of a thread."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except OSError:  # it has ended
        return 0.0
