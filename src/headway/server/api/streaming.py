"""Work that runs concurrently with a response, feeds it, and ends with it.

    relay(work)           work puts events into a bounded queue, and the response takes them; leaving cancels the work
    EventStreamResponse   server-sent events; holds its resources until it ends, however it ends

When a client disconnects, its route's task is cancelled: the work is cancelled with it, its contexts are released, and
the pass in flight is undone within one step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.base.dataclass import dataclass
from headway.models.adapters.adapter import Adapter
from headway.program.context import Context
from headway.server.errors import ApiError, error_event

EVENTS, JSON_LINES = "text/event-stream", "application/x-ndjson"
QUEUE_SIZE = 64  # events that wait for a slow reader before the work waits too
DEPTH = 5  # response, choices, choice, log-probabilities, those of one token
_write = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
Event = TypeVar("Event")
Put = Callable[[Event], Awaitable[None]]


@dataclass(frozen=True)
class _Failed:
    error: Exception


@asynccontextmanager
async def relay(work: Callable[[Put[Event]], Awaitable[None]]) -> AsyncIterator[AsyncIterator[list[Event]]]:
    """What `work` puts, in lists of all that is ready; an error that it raises comes after what it put."""
    queue: asyncio.Queue[Event | _Failed | None] = asyncio.Queue(QUEUE_SIZE)

    async def run() -> None:
        try:
            await work(queue.put)
        except Exception as error:
            await queue.put(_Failed(error))
        else:
            await queue.put(None)

    task = asyncio.create_task(run())
    events = _batches(queue)
    try:
        yield events
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _batches(queue: asyncio.Queue[Any]) -> AsyncIterator[list[Any]]:
    while True:
        batch = [await queue.get()]
        while not queue.empty():
            batch.append(queue.get_nowait())
        last = batch[-1]
        ended = last is None or isinstance(last, _Failed)
        if len(batch) > ended:
            yield batch[: len(batch) - ended]
        if isinstance(last, _Failed):
            raise last.error
        if ended:
            return


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently; when one fails or this is cancelled, cancel the others and wait for them, then raise."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@asynccontextmanager
async def forks(
    home: Context, count: int, adapters: Sequence[tuple[Adapter, float]] = ()
) -> AsyncIterator[list[Context]]:
    """The context and forks of it, `count` in total; they share the prompt's pages, which are computed once."""
    copies: list[Context] = []
    try:
        if count > 1:
            await home.flush(adapter=adapters)
            copies += [home.fork() for _ in range(count - 1)]
        yield [home, *copies]
    finally:
        for fork in copies:
            fork.release()


def event(value: Any, pack: Callable[[Any], bytes]) -> bytes:
    """A server-sent event."""
    return b"data: " + pack(value) + b"\n\n"


def json_bytes(value: Any) -> bytes:
    """Compact JSON."""
    return _write(value).encode()


def json_bytes_in_pieces(value: Any) -> bytes:
    """The same, written piece by piece: writing megabytes at once would hold the GIL for all that time."""
    return "".join(_pieces(value, DEPTH)).encode()


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if not depth or not value or not isinstance(value, dict | list):
        yield _write(value)
        return
    begin, end = "{}" if isinstance(value, dict) else "[]"
    for i, (name, one) in enumerate(value.items() if isinstance(value, dict) else (("", one) for one in value)):
        yield ("," if i else begin) + (f"{_write(name)}:" if isinstance(value, dict) else "")
        yield from _pieces(one, depth - 1)
    yield end


class EventStreamResponse(Response):
    """Server-sent events or JSON lines. `held` is closed at the end, also when the client left before the start.

    `failed` writes the last event of a stream that is cancelled.
    """

    media_type = EVENTS

    def __init__(
        self,
        events: AsyncIterator[bytes],
        held: AsyncExitStack,
        *,
        failed: Callable[[ApiError], bytes] = error_event,
        media_type: str = EVENTS,
    ) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.media_type, self._events, self._held, self._failed = media_type, events, held, failed
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["error_event"] = self._failed
        async with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
