"""The lifetime of a request: it ends when its client disconnects or its time is up, and its work ends with it.

The route runs in its own task. To end a request that task is cancelled: everything it holds in a `with` is released,
and a generation stops within one step and frees its pages.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.errors import FAILED, ApiError, as_api_error, error_event
from headway.server.models.lease import end_leases
from headway.server.serving import Serving

STREAMS = (b"text/event-stream", b"application/x-ndjson")


class RequestLifetime:
    """Runs the route and cancels it: on a disconnect, on a timeout, or from outside (`Serving.cancels`)."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        task = _RequestTask(scope, receive, send)
        limit = self._serving.settings.request_timeout
        timeout = ApiError(
            504,
            f"the request took longer than {limit:g} s; ask for fewer tokens",
            code="request_timeout",
            headers={"x-should-retry": "false"},  # automatic retries would make it worse
        )
        timer = asyncio.get_running_loop().call_later(limit, task.cancel, timeout)
        self._serving.cancels.add(task.cancel)
        try:
            await task.run(self._app)
        finally:
            end_leases(scope)
            timer.cancel()
            self._serving.cancels.discard(task.cancel)


class _RequestTask:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._cancelled = asyncio.get_running_loop().create_future()  # of ApiError | None: why it was cancelled
        self._started = self._streams = self._complete = False

    def cancel(self, why: ApiError | None) -> None:
        """Cancel the request, and tell the client why unless it has disconnected (None)."""
        if not self._cancelled.done():
            self._cancelled.set_result(why)

    async def run(self, app: ASGIApp) -> None:
        work = asyncio.create_task(app(self._scope, self._inbox.get, self._tracked_send))  # type: ignore[arg-type]
        listener = asyncio.create_task(self._listen())
        try:
            await asyncio.wait({work, self._cancelled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({work})
        if self._cancelled.done() and work.cancelled():
            await self._report(self._cancelled.result())
        elif work.cancelled():
            raise RuntimeError("the route cancelled itself")
        elif (error := work.exception()) is not None:
            if self._in_stream:
                await self._send_event(_known(error))
            raise error

    async def _listen(self) -> None:
        """Pass on what the client sends until it disconnects."""
        while True:
            message = await self._receive()
            await self._inbox.put(message)
            if message["type"] == "http.disconnect":
                if not self._complete:
                    self.cancel(None)
                return

    async def _tracked_send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            kind = next((value for name, value in message.get("headers", []) if name == b"content-type"), b"")
            self._streams = kind.startswith(STREAMS)
        elif message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)
        await self._send(message)

    async def _report(self, why: ApiError | None) -> None:
        """Send the reason: as a response if none was started, as an event in a stream that was."""
        if why is not None and not self._started:
            raise why
        if why is not None and self._in_stream:
            await self._send_event(why)

    @property
    def _in_stream(self) -> bool:
        return self._started and self._streams and not self._complete

    async def _send_event(self, why: ApiError) -> None:
        write = self._scope["state"].get("error_event", error_event)  # a stream of another API has its own format
        await self._send({"type": "http.response.body", "body": write(why), "more_body": False})


def _known(error: BaseException) -> ApiError:
    """The error a client gets in the middle of a stream; Starlette wraps those that have a handler."""
    cause = error.__cause__
    known = as_api_error(error) or (None if cause is None else as_api_error(cause))
    return known or ApiError(500, FAILED)
