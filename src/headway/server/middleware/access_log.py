"""The access log: a request id, one log line and a count for each request, and an error body for each error."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server import logs, telemetry
from headway.server.errors import FAILED, ApiError, error_body, route_path
from headway.server.middleware.key_check import POLLED_PATHS
from headway.server.serving import Serving
from headway.server.telemetry import RequestTrace

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
DRAIN_SECONDS, DRAIN_PAUSE, DRAIN_BYTES = 2.0, 0.3, 64 << 20  # for a client that is still sending a rejected request
CLIENT_CLOSED_REQUEST = 499


class AccessLog:
    """The outermost middleware: logs and counts every request, and turns every error into a response."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await self._serve_websocket(scope, receive, send)
        headers = Headers(scope=scope)
        id = logs.new_request_id(headers.get("x-request-id"))
        values: dict[str, Any] = {}
        path, traces = route_path(scope), self._serving.traces
        trace = None if traces is None or path in POLLED_PATHS else traces.begin(scope, path)
        tokens = logs.request_id.set(id), logs.request_values.set(values), telemetry.request_trace.set(trace)
        scope.setdefault("state", {})["request_id"] = id
        exchange = _Exchange(id, path, receive, send, may_drain="expect" not in headers, trace=trace)
        start = time.perf_counter()
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            await self._send_error(error, exchange)
        finally:
            self._record(scope, exchange, time.perf_counter() - start, values, trace)
            logs.request_id.reset(tokens[0])
            logs.request_values.reset(tokens[1])
            telemetry.request_trace.reset(tokens[2])

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same for a WebSocket, whose session logs its own lines: an error before it is open is a response."""
        id = logs.new_request_id(Headers(scope=scope).get("x-request-id"))
        token = logs.request_id.set(id)
        opened = False

        async def send_or_note(message: Message) -> None:
            nonlocal opened
            opened = opened or message["type"] == "websocket.accept"
            await send(message)

        try:
            if scope["query_string"]:
                raise ApiError(400, "this WebSocket takes no query: the key goes into a header or the first message")
            await self._app(scope, receive, send_or_note)
        except Exception as error:
            if not isinstance(error, ApiError):
                logs.failure("a session failed", error, with_text=self._serving.settings.log_prompts)
                error = ApiError(500, FAILED)
            logs.info("session rejected", status=error.status, opened=opened)
            await (_close if opened else _deny)(error, id, send)
        finally:
            logs.request_id.reset(token)

    async def _send_error(self, error: Exception, exchange: _Exchange) -> None:
        if not isinstance(error, ApiError):
            logs.failure("a request failed", error, with_text=self._serving.settings.log_prompts)
            error = ApiError(500, FAILED)
        if exchange.status is None:
            await exchange.send_error(error)

    def _record(
        self, scope: Scope, exchange: _Exchange, seconds: float, values: dict[str, Any], trace: RequestTrace | None
    ) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        status = CLIENT_CLOSED_REQUEST if exchange.status is None else exchange.status
        route = _route(scope)
        self._serving.metrics.responded(method, route, status)
        if trace is not None:
            trace.end(method, route, exchange.status, scope["state"]["request_id"], complete=exchange.complete)
        if status < 400 and (route_path(scope) in POLLED_PATHS or not self._serving.settings.log_requests):
            return
        tenant = scope["state"].get("tenant")
        client = scope.get("client")
        logs.info(
            "request",
            method=method,
            path=scope.get("raw_path", b"").partition(b"?")[0][:256].decode("ascii", "backslashreplace"),
            status=status,
            complete=exchange.complete,
            ms=round(seconds * 1e3, 1),
            bytes_in=exchange.bytes_in,
            bytes_out=exchange.bytes_out,
            **values,
            **({} if tenant is None else {"tenant": tenant.name}),
            **({} if not client else {"client": client[0]}),
        )


async def _deny(error: ApiError, id: str, send: Send) -> None:
    """An error response instead of a WebSocket."""
    body = error_body(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": id,
        **error.headers,
    }
    encoded = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "websocket.http.response.body", "body": body})


async def _close(error: ApiError, id: str, send: Send) -> None:
    """Close a WebSocket that was open when something failed."""
    with suppress(RuntimeError):  # it is closed
        await send({"type": "websocket.close", "code": 1011, "reason": f"internal error; see {id} in the server's log"})


def _route(scope: Scope) -> str:
    """The path pattern of a request's route, also when it was rejected before it got there."""
    if "route" not in scope:
        matches = ((route.matches(scope)[0], route) for route in scope["app"].state.routes)
        routes = [route for match, route in matches if match is not Match.NONE]
        return getattr(next(iter(routes), None), "path", "other")
    return getattr(scope["route"], "path", "other")


class _Exchange:
    """Counts the bytes of one request and its response as they pass through."""

    def __init__(
        self, id: str, path: str, receive: Receive, send: Send, *, may_drain: bool, trace: RequestTrace | None
    ) -> None:
        self.status: int | None = None
        self.complete = False
        self.bytes_in = self.bytes_out = 0
        self._id, self._path, self._receive, self._send, self._may_drain = id, path, receive, send, may_drain
        self._trace = trace if trace is not None and trace.keeps_bodies else None  # if it has bodies
        self._more = True  # whether more of the request body may come

    async def receive(self) -> Message:
        message = await self._receive()
        self.bytes_in += len(body := message.get("body", b""))
        if self._trace is not None:
            self._trace.keep("request", body)
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._id
            headers["X-Content-Type-Options"] = "nosniff"
        elif message["type"] == "http.response.body":
            self.bytes_out += len(body := message.get("body", b""))
            if self._trace is not None:
                self._trace.keep("response", body)
            self.complete = not message.get("more_body", False)
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """Send an error response. Keeps reading what the client still sends for a moment, so that it can read this."""
        body = error_body(error, self._path)
        unread = self._more
        headers = {"content-type": "application/json", "content-length": str(len(body)), **(error.headers or {})}
        if unread:
            headers["connection"] = "close"
        encoded = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        if unread and self._may_drain:
            await self._drain()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self) -> None:
        """Read and discard what the client sends, within a time and a size."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._more and self.bytes_in < DRAIN_BYTES:
                    await asyncio.wait_for(self.receive(), DRAIN_PAUSE)
