"""Routes called inside the process, without HTTP: rows of batches go the same way as requests of clients.

`call_route` skips the middleware: there is no connection, no key to check (the tenant is known) and no time limit for
one request. Admission stays: a row waits until the queue has room, so that clients come first.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from headway.base.errors import HeadwayError
from headway.jobs.requests import RowRequest, RowResponse
from headway.server import logs, telemetry
from headway.server.errors import FAILED, ApiError, as_api_error, bad_request, error_body
from headway.server.keys import Tenant
from headway.server.models.lease import end_leases
from headway.server.serving import Serving

WAITS = ("queue_full", "loading", "stuck")  # codes of responses after which a row is tried again
WAIT_SECONDS = 0.25


def routes_of(app: FastAPI) -> ASGIApp:
    """An application's routes and error handlers, without its middleware."""
    bare = copy.copy(app)
    bare.user_middleware = []
    return bare.build_middleware_stack()


async def call_route(
    routes: ASGIApp, app: FastAPI, request: RowRequest, tenant: Tenant, *, reveal: bool = False
) -> RowResponse:
    """The response to a request, once the queue has room for it. With `reveal`, a failure says what it was."""
    id = logs.new_request_id()
    serving: Serving = app.state.serving
    trace = None if serving.traces is None else serving.traces.row(request.url)
    tokens = logs.request_id.set(id), logs.request_values.set(None), telemetry.request_trace.set(trace)
    try:
        while True:
            response = await _call_once(routes, app, request, tenant, id, reveal=reveal)
            if response.status not in (429, 503) or response.error.get("code") not in WAITS:
                return response
            await asyncio.sleep(WAIT_SECONDS)
    finally:
        logs.request_id.reset(tokens[0])
        logs.request_values.reset(tokens[1])
        telemetry.request_trace.reset(tokens[2])


async def _call_once(
    routes: ASGIApp, app: FastAPI, request: RowRequest, tenant: Tenant, id: str, *, reveal: bool
) -> RowResponse:
    scope = _scope(app, request.url, {"tenant": tenant, "request_id": id})
    try:
        exchange = _RouteCall(json.dumps(request.body).encode())
        await routes(scope, exchange.receive, exchange.send)
        return RowResponse(exchange.status, json.loads(exchange.body), id)
    except RecursionError:
        known = bad_request("the body is nested too deeply; make it flatter", code="invalid_json")
        return RowResponse(400, json.loads(error_body(known)), id)
    except Exception as error:
        known = as_api_error(error) if isinstance(error, HeadwayError | ApiError) else None
        if known is None or known.status == 500:
            serving: Serving = app.state.serving
            logs.failure("a row of a batch failed", error, with_text=serving.settings.log_prompts)
            known = ApiError(500, f"{type(error).__name__}: {error}" if reveal else FAILED)
        return RowResponse(known.status, json.loads(error_body(known)), id)
    finally:
        end_leases(scope)


def _scope(app: FastAPI, path: str, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "app": app,
        "state": state,
        "extensions": {},
    }


class _RouteCall:
    """One request's body, and its response as it comes."""

    def __init__(self, body: bytes) -> None:
        self._unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._pieces: list[bytes] = []
        self.status = 0

    async def receive(self) -> Message:
        if not self._unread:
            await asyncio.get_running_loop().create_future()  # nobody disconnects
        return self._unread.pop()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._pieces.append(message.get("body", b""))

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)
