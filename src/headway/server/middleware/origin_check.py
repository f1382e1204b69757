"""The origin check (CORS): web pages of other origins are rejected, not only kept from reading the response."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.errors import ApiError
from headway.server.serving import Serving

_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(\s*,\s*[A-Za-z0-9-]+)*")


class OriginCheck:
    """Answers CORS preflights and rejects web pages that are not allowed. Only browsers send an Origin."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._allowed = frozenset(origin.lower() for origin in serving.settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else Headers()
        origin = headers.get("origin")
        if origin is None:
            return await self._app(scope, receive, send)
        if len(headers.getlist("origin")) > 1:
            raise ApiError(
                403, "the request has several Origin headers; a browser sends one", code="origin_not_allowed"
            )
        if origin.lower() in {f"http://{headers['host']}".lower(), f"https://{headers['host']}".lower()}:
            return await self._app(scope, receive, send)  # this server's own page
        if "*" not in self._allowed and origin.lower() not in self._allowed:
            raise ApiError(
                403,
                "web pages from this origin may not call this server; its operator can allow them with --cors-origin",
                code="origin_not_allowed",
            )
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        allow_origin = "*" if "*" in self._allowed else origin
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return await _preflight(allow_origin, headers, send)

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                response = MutableHeaders(scope=message)
                response["Access-Control-Allow-Origin"] = allow_origin
                response["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
                response.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_with_origin)


async def _preflight(origin: str, headers: Headers, send: Send) -> None:
    requested = headers.get("access-control-request-headers", "")
    allowed = requested if _HEADER_NAMES.fullmatch(requested) else "authorization, content-type"
    response_headers = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": allowed,
        "access-control-max-age": "600",
        "vary": "Origin",
    }
    encoded = [(k.encode(), v.encode("latin-1")) for k, v in response_headers.items()]
    await send({"type": "http.response.start", "status": 204, "headers": encoded})
    await send({"type": "http.response.body", "body": b""})
