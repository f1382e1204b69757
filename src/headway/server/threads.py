"""Threads for CPU work that would block the event loop: some parse and tokenize requests, others write responses.

Whoever waits for a thread was admitted to the queue first, which bounds the wait; work that is canceled before it
starts is never run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class WorkerThreads:
    """A small thread pool with one purpose."""

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"headway-{name}")

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """The result of `work(*args)`, run in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        """Take no more work, without waiting for what is running."""
        self._pool.shutdown(wait=False, cancel_futures=True)
