"""Runs a program to its end, in a thread of its own where the caller's has a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any, TypeVar

from headway.base.errors import WrongType
from headway.base.text import short_repr

Result = TypeVar("Result")
POLL = 0.1  # seconds between checks whether the waiting task was cancelled


def run_program(program: Callable[..., Awaitable[Result]], *args: Any) -> Result:
    """Run `program(*args)` to its end and return its value."""
    if not callable(program):
        raise WrongType(f"the program is {short_repr(program)}; give run an async function that takes the engine")

    async def main() -> Result:
        running = program(*args)
        if not isawaitable(running):
            raise WrongType(
                f"the program returned {short_repr(running)}, which cannot be awaited; write it with async def"
            )
        return await running

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        inside = False
    else:
        inside = True
    # Outside of the `except`, or every error of the program would be shown as one during the handling of that one.
    return run_in_thread(main) if inside else asyncio.run(main())


def run_in_thread(main: Callable[[], Awaitable[Result]]) -> Result:
    """Run a coroutine function on an event loop of its own and return its result."""
    result: list[Any] = []
    tasks: list[asyncio.Task[Any]] = []

    async def tracked() -> Result:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await main()

    def work() -> None:
        try:
            result.extend((True, asyncio.run(tracked())))
        except BaseException as e:
            result.extend((False, e))

    thread = threading.Thread(target=work, name="headway-program")
    thread.start()
    try:
        _join(thread)
    except BaseException:  # ctrl-C, or a cancelled task: the program ends with it
        for task in tasks:
            with suppress(RuntimeError):  # it has finished
                task.get_loop().call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if not result[0]:
        raise result[1]
    return result[1]


def _join(thread: threading.Thread) -> None:
    """Wait for a thread; raises when the waiting task is cancelled, which it cannot notice while it blocks."""
    own = asyncio.current_task()
    before = 0 if own is None else own.cancelling()
    while thread.is_alive():
        thread.join(POLL)
        if own is not None and own.cancelling() > before:
            raise asyncio.CancelledError
