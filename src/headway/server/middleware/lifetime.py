"""The life of a request: it ends with its client, and when its time is over, and its work with it.

The route runs in a task of its own. When the client leaves, or somebody ends the request, that task is cancelled:
whatever it holds in a `with` is given back, a generation stops within a step and its pages are free.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.errors import FAILED, ApiError, as_api_error, error_body
from headway.server.serving import Serving

EVENTS = b"text/event-stream"


class Life:
    """Runs the route, and ends it: client gone, too old, or ended from outside (`Serving.ends`)."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        life = _Life(receive, send)
        limit = self._serving.settings.request_timeout
        late = ApiError(
            504,
            f"this request took longer than {limit:g} s; ask for fewer tokens",
            code="request_timeout",
            headers={"x-should-retry": "false"},  # clients that retry by themselves would make it worse
        )
        timer = asyncio.get_running_loop().call_later(limit, life.end, late)
        self._serving.ends.add(life.end)
        try:
            await life.run(self._app, scope)
        finally:
            timer.cancel()
            self._serving.ends.discard(life.end)


class _Life:
    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._over = asyncio.get_running_loop().create_future()  # of ApiError | None: why it ends before its end
        self._started = self._streams = self._complete = False

    def end(self, why: ApiError | None) -> None:
        """End the request; the client, if it is still there, is told why."""
        if not self._over.done():
            self._over.set_result(why)

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        work = asyncio.create_task(app(scope, self._inbox.get, self._watched_send))  # type: ignore[arg-type]
        ears = asyncio.create_task(self._listen())
        try:
            await asyncio.wait({work, self._over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ears.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({work})
        if self._over.done() and work.cancelled():
            await self._say(self._over.result())
        elif work.cancelled():
            raise RuntimeError("the route cancelled itself")
        elif (error := work.exception()) is not None:
            if self._in_stream:
                await self._tell(_known(error))
            raise error

    async def _listen(self) -> None:
        """Hand on what the client sends until it leaves."""
        while True:
            message = await self._receive()
            await self._inbox.put(message)
            if message["type"] == "http.disconnect":
                if not self._complete:
                    self.end(None)
                return

    async def _watched_send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            kind = next((value for name, value in message.get("headers", []) if name == b"content-type"), b"")
            self._streams = kind.startswith(EVENTS)
        elif message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)
        await self._send(message)

    async def _say(self, why: ApiError | None) -> None:
        """Why it was ended: an answer if there was none yet, an event in a stream that has begun."""
        if why is not None and not self._started:
            raise why
        if why is not None and self._in_stream:
            await self._tell(why)

    @property
    def _in_stream(self) -> bool:
        return self._started and self._streams and not self._complete

    async def _tell(self, why: ApiError) -> None:
        event = b"data: " + error_body(why) + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _known(error: BaseException) -> ApiError:
    """What a client is told of an error in the middle of a stream; starlette wraps those that have a handler."""
    cause = error.__cause__
    known = as_api_error(error) or (None if cause is None else as_api_error(cause))
    return known or ApiError(500, FAILED)
