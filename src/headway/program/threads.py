"""A program run to its end in a thread of its own, for callers in whose thread an event loop runs already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
LOOK = 0.1  # seconds between looks at whether somebody cancelled a program that this thread waits for


def run_in_thread(main: Callable[[], Awaitable[Result]]) -> Result:
    """Run a coroutine function on a loop of its own, beside the one that runs in this thread."""
    box: list[Any] = []
    tasks: list[asyncio.Task[Any]] = []

    async def known() -> Result:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await main()

    def work() -> None:
        try:
            box.extend((True, asyncio.run(known())))
        except BaseException as e:
            box.extend((False, e))

    thread = threading.Thread(target=work, name="headway-program")
    thread.start()
    try:
        _join(thread)
    except BaseException:  # ctrl-C, or a cancelled task: the program ends with it
        for task in tasks:
            with suppress(RuntimeError):  # it has ended
                task.get_loop().call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if not box[0]:
        raise box[1]
    return box[1]


def _join(thread: threading.Thread) -> None:
    """Wait for a thread; raises when the task that waits is cancelled, which it cannot learn by itself."""
    own = asyncio.current_task()
    before = 0 if own is None else own.cancelling()
    while thread.is_alive():
        thread.join(LOOK)
        if own is not None and own.cancelling() > before:
            raise asyncio.CancelledError
