"""Threads beside the event loop, for work on values: some read what clients send, others write their answers.

Who waits for one was counted in, so that there are never more than the queue takes; who leaves before is not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """A few threads of one purpose."""

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"headway-{name}")

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """What `work` returns, once a thread had time for it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        """Take no more work; nobody waits for what runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
