"""The notifier: a thread that resolves outcomes and wakes whoever awaits them, while the worker computes.

Waking an event loop hands the interpreter over to it, which the worker must not wait for.
"""

from __future__ import annotations

import queue
import threading

from headway.runtime.job import Delivery
from headway.runtime.outcome import resolve, wake_all


class Notifier:
    """Delivers what is put, in order."""

    def __init__(self) -> None:
        self._boxes: queue.SimpleQueue[list[Delivery] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headway-notify", daemon=True)
        self._thread.start()

    def put(self, box: list[Delivery]) -> None:
        """Deliver these soon."""
        self._boxes.put(box)

    def stop(self) -> None:
        """End the thread after what was put."""
        self._boxes.put(None)

    def join(self) -> None:
        """Wait for the thread's end, from any thread, its own included."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (box := self._boxes.get()) is not None:
            resolve(box)
            wake_all([job for job, _ in box])
            del box  # waiting for the next one keeps no job alive
