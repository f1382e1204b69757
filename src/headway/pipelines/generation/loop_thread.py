"""An event loop in a thread of its own, for generation behind a pipeline's synchronous calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from headway.base.errors import Closed


class LoopThread:
    """An event loop in its own thread, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine there."""
        with self._lock:
            if self._closed:
                work.close()
                raise Closed("this pipeline is closed; create a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="headway-generation", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join()
            loop.close()
