"""Answers: what became of passes, given to those who wait for them in threads and event loops. Needs no lock."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from headway.base.errors import HeadwayError
from headway.runtime.scheduler.order import Job

Answer = tuple[Job, HeadwayError | None]  # it failed with this, or it succeeded


def resolve(box: list[Answer]) -> None:
    """Give every job in a box its result or its error."""
    for job, error in box:
        if error is not None:
            job.outcome.fail(error)
        elif job.streak is None and not job.outcome.done():
            job.outcome.succeed(job.result())


def wake_all(jobs: list[Job]) -> None:
    """Everyone who awaits one of these jobs goes on, with one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        for loop in {loop for loop, _ in job.waiters}:
            by_loop.setdefault(loop, []).append(job)
    for loop, there in by_loop.items():
        with suppress(RuntimeError):  # that loop was closed, and nobody waits there any more
            loop.call_soon_threadsafe(_wake, loop, there)


def _wake(loop: asyncio.AbstractEventLoop, jobs: list[Job]) -> None:
    """In the loop's own thread: everyone who waits there for these jobs goes on."""
    for job in jobs:
        for owner, waiter in job.waiters:
            if owner is loop and not waiter.done():
                waiter.set_result(None)
