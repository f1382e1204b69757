"""Threads for work that would block the event loop: some parse and tokenize requests, others write responses, others
load models.

Whoever waits for a thread was admitted to the queue first, which bounds the wait; work that is cancelled before it
starts is never run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
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


class LoaderThreads:
    """A thread for each model that loads. The server does not wait for them if it exits first."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a thread still loads, which Python would wait for."""
        return any(thread.is_alive() for thread in self._threads)

    def run(self, work: Callable[[], T], discard: Callable[[T], None] = lambda result: None) -> asyncio.Future[T]:
        """The result of `work()`, to come; one that nobody waits for any more is discarded."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def succeed(result: T) -> None:
            discard(result) if future.done() else future.set_result(result)

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        def run() -> None:
            try:
                settle = partial(succeed, work())
            except BaseException as error:
                settle = partial(fail, error)
            with suppress(RuntimeError):  # the loop is closed, and the process is about to exit
                loop.call_soon_threadsafe(settle)

        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=run, name="headway-load", daemon=True)
        self._threads.add(thread)
        thread.start()
        return future
