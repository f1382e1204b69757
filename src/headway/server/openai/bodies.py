"""Bodies are JSON, whatever a client calls them: `curl -d` says that it sends a form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders

OTHERS = ("", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream")


class JsonRoute(APIRoute):
    """A route that reads a body as JSON also when it is called something else, or nothing.

    Web pages can send such bodies without asking first; the walls refuse those of other origins by their Origin.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            headers = MutableHeaders(scope=request.scope)
            if headers.get("content-type", "").partition(";")[0].strip().lower() in OTHERS:
                headers["content-type"] = "application/json"
            return await handle(Request(request.scope, request.receive, request._send))

        return handle_json
