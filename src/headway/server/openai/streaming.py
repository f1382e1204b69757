"""The one way in which answers are made: work that runs beside the response and feeds it, and ends with it.

    relayed(work)   work puts events into a bounded queue; the response takes them. Leaving it ends the work.
    EventStream     a response of server-sent events that holds what it needs until its end, whatever that is

A client that leaves cancels its route's task: the queue's work is cancelled with it, contexts are released on the way
out, and the pass under way is undone within a step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.program.context import Context

ROOM = 64  # events that a slow reader leaves waiting before the work does
DEPTH = 5  # from an answer through choices, a choice and its log-probabilities to those of one token
_write = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
Event = TypeVar("Event")
Put = Callable[[Event], Awaitable[None]]


@dataclass(frozen=True)
class _Failed:
    error: Exception


@asynccontextmanager
async def relayed(work: Callable[[Put[Event]], Awaitable[None]]) -> AsyncIterator[AsyncIterator[list[Event]]]:
    """What `work` puts, in lists of all that is there; an error it raises comes behind what it put before."""
    queue: asyncio.Queue[Event | _Failed | None] = asyncio.Queue(ROOM)

    async def run() -> None:
        try:
            await work(queue.put)
        except Exception as error:
            await queue.put(_Failed(error))
        else:
            await queue.put(None)

    task = asyncio.create_task(run())
    events = _taken(queue)
    try:
        yield events
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _taken(queue: asyncio.Queue[Any]) -> AsyncIterator[list[Any]]:
    while True:
        found = [await queue.get()]
        while not queue.empty():
            found.append(queue.get_nowait())
        last = found[-1]
        ended = last is None or isinstance(last, _Failed)
        if len(found) > ended:
            yield found[: len(found) - ended]
        if isinstance(last, _Failed):
            raise last.error
        if ended:
            return


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; when one fails, or this is cancelled, the others are cancelled and have ended before it is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@asynccontextmanager
async def copies(home: Context, count: int) -> AsyncIterator[list[Context]]:
    """The context and forks of it, `count` in all; they share the prompt's pages, which are computed once."""
    forks: list[Context] = []
    try:
        if count > 1:
            await home.flush()
            forks += [home.fork() for _ in range(count - 1)]
        yield [home, *forks]
    finally:
        for fork in forks:
            fork.release()


def event(value: Any, pack: Callable[[Any], bytes]) -> bytes:
    """A server-sent event."""
    return b"data: " + pack(value) + b"\n\n"


def packed(value: Any) -> bytes:
    """JSON, as short as it goes."""
    return _write(value).encode()


def packed_in_pieces(value: Any) -> bytes:
    """The same for a thread, made bit by bit: one that writes megabytes at once keeps all other threads waiting."""
    return "".join(_bits(value, DEPTH)).encode()


def _bits(value: Any, depth: int) -> Iterator[str]:
    if not depth or not value or not isinstance(value, dict | list):
        yield _write(value)
        return
    begin, end = "{}" if isinstance(value, dict) else "[]"
    for i, (name, one) in enumerate(value.items() if isinstance(value, dict) else (("", one) for one in value)):
        yield ("," if i else begin) + (f"{_write(name)}:" if isinstance(value, dict) else "")
        yield from _bits(one, depth - 1)
    yield end


class EventStream(Response):
    """Server-sent events. What is `held` is let go at the end, also when the client leaves before the beginning."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._events, self._held = events, held
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
