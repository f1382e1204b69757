"""What stands around every route, as plain ASGI: each wall looks at one thing before the next one sees the request.

    Trail    a request id, the access log, counts; any error that comes back becomes an answer in OpenAI's shape
    Door     the size of the head, its one length, and the Host it names (a web page must not reach a local server under
             its own name)
    Origins  which web pages may call; all others are refused, not only kept from reading the answer
    KeyCheck every path but /health and the files of the Lab's page, when there are keys; how often each may come
    Body     see bodies.py: size and time, before anything is parsed
    Life     see lives.py: the client is still there, and the request is not too old

A wall refuses by raising `ApiError`; only Trail writes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server import access_log as logs
from headway.server.auth import bearer
from headway.server.errors import FAILED, ApiError, error_body
from headway.server.serving import Serving
from headway.server.settings import ANY_HOST, EVERYWHERE, Settings

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
LINGER_SECONDS, LINGER_PAUSE, LINGER_BYTES = 2.0, 0.3, 64 << 20  # for a client that still sends what was refused
CLIENT_GONE = 499
WATCHED = frozenset({"/health", "/metrics", "/stats", "/lab/api/model", "/lab/api/pages", "/lab/api/steps"})
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{1,5})?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(\s*,\s*[A-Za-z0-9-]+)*")


class Trail:
    """The outermost wall: what happened to a request is written down here, and every error becomes an answer."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # there is no other kind here, and no wall would look at it
            return await send({"type": "websocket.close", "code": 1008})
        headers = Headers(scope=scope)
        id = logs.new_request_id(headers.get("x-request-id"))
        token = logs.request_id.set(id)
        scope.setdefault("state", {})["request_id"] = id
        exchange = _Exchange(id, receive, send, may_linger="expect" not in headers)
        began = time.perf_counter()
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            await self._answer(error, exchange)
        finally:
            self._note(scope, exchange, time.perf_counter() - began)
            logs.request_id.reset(token)

    async def _answer(self, error: Exception, exchange: _Exchange) -> None:
        if not isinstance(error, ApiError):
            logs.failure("a request failed", error, with_text=self._serving.settings.log_prompts)
            error = ApiError(500, FAILED)
        if exchange.status is None:
            await exchange.refuse(error)

    def _note(self, scope: Scope, exchange: _Exchange, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        status = CLIENT_GONE if exchange.status is None else exchange.status
        self._serving.metrics.answered(method, getattr(scope.get("route"), "path", "other"), status)
        if scope["path"] in WATCHED and status < 400:
            return  # those who watch ask again and again
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
            **({} if tenant is None else {"tenant": tenant.name}),
            **({} if not client else {"client": client[0]}),
        )


class _Exchange:
    """A request and its answer, as they pass."""

    def __init__(self, id: str, receive: Receive, send: Send, *, may_linger: bool) -> None:
        self.status: int | None = None
        self.complete = False
        self.bytes_in = self.bytes_out = 0
        self._id, self._receive, self._send, self._may_linger = id, receive, send, may_linger
        self._more = True  # of the request

    async def receive(self) -> Message:
        message = await self._receive()
        self.bytes_in += len(message.get("body", b""))
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._id
            headers["X-Content-Type-Options"] = "nosniff"
        elif message["type"] == "http.response.body":
            self.bytes_out += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Send an error whole. What the client still sends is dropped for a moment, so that it gets to read this."""
        body = error_body(error)
        unread = self._more
        headers = {"content-type": "application/json", "content-length": str(len(body)), **(error.headers or {})}
        if unread:
            headers["connection"] = "close"
        encoded = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        if unread and self._may_linger:
            await self._linger()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self) -> None:
        """Read and drop while the client keeps sending, for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while self._more and self.bytes_in < LINGER_BYTES:
                    await asyncio.wait_for(self.receive(), LINGER_PAUSE)


class Door:
    """Refuses a head that is too large or says two lengths, and a Host that is not this server's."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._limit = app, serving.settings.max_header_bytes
        self._hosts = HostCheck(serving.settings, has_keys=serving.keys is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # A head that comes in one piece is parsed whatever its size: the protocol's own limit is for pieces.
            size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            size += len(scope.get("raw_path", b"")) + len(scope["query_string"])
            if size > self._limit:
                raise ApiError(431, f"the head of this request has {size} bytes; the limit is {self._limit}")
            names = [name for name, _ in scope["headers"]]
            if b"content-length" in names and b"transfer-encoding" in names:  # a proxy may have read the other one
                raise ApiError(
                    400,
                    "this request has a Content-Length and a Transfer-Encoding; send one of them",
                    headers={"Connection": "close"},
                )
            self._hosts.check([value for name, value in scope["headers"] if name == b"host"])
        await self._app(scope, receive, send)


class HostCheck:
    """Which names a client may call this server by.

    This machine's own (localhost, loopback addresses), what it listens on, and those that were named. Beyond loopback
    also plain addresses, which no page can have for a name of its own (health checks use them); and with keys and
    nothing named, any: a page that gets here under its own name still has no key.
    """

    def __init__(self, settings: Settings, *, has_keys: bool) -> None:
        named = {host.lower() for host in settings.allowed_hosts}
        self._any = ANY_HOST in named or (has_keys and not named and not settings.on_loopback)
        self._loopback_only = settings.on_loopback
        self._names = named | {"localhost", settings.host.lower()} - EVERYWHERE

    def check(self, values: list[bytes]) -> None:
        """Raise unless there is exactly one Host, well-formed and allowed."""
        text = values[0].decode("latin-1").lower() if len(values) == 1 else ""
        found = _HOST.fullmatch(text)
        if found is None:
            raise ApiError(400, "this request needs exactly one well-formed Host header", code="invalid_host")
        if not (self._any or found[1] in self._names or self._is_ours(found[1])):
            raise ApiError(
                400,
                "this server does not go by the name in the Host header; whoever runs it can add the name with "
                "--allowed-host",
                code="host_not_allowed",
            )

    def _is_ours(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback if self._loopback_only else not address.is_unspecified


class Origins:
    """Answers preflights, and refuses web pages that are not allowed. What is no browser sends no Origin."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._allowed = frozenset(origin.lower() for origin in serving.settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None:
            return await self._app(scope, receive, send)
        if len(headers.getlist("origin")) > 1:
            raise ApiError(
                403, "this request has several Origin headers; a browser sends one", code="origin_not_allowed"
            )
        if origin.lower() in {f"http://{headers['host']}".lower(), f"https://{headers['host']}".lower()}:
            return await self._app(scope, receive, send)  # a page of this server's own
        if "*" not in self._allowed and origin.lower() not in self._allowed:
            raise ApiError(
                403,
                "web pages of this origin may not call this server; whoever runs it can allow them with --cors-origin",
                code="origin_not_allowed",
            )
        shown = "*" if "*" in self._allowed else origin
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return await _preflight(shown, headers, send)

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["Access-Control-Allow-Origin"] = shown
                answer["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
                answer.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_with_origin)


async def _preflight(origin: str, headers: Headers, send: Send) -> None:
    asked = headers.get("access-control-request-headers", "")
    allowed = asked if _HEADER_NAMES.fullmatch(asked) else "authorization, content-type"
    answer = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "access-control-allow-headers": allowed,
        "access-control-max-age": "600",
        "vary": "Origin",
    }
    encoded = [(k.encode(), v.encode("latin-1")) for k, v in answer.items()]
    await send({"type": "http.response.start", "status": 204, "headers": encoded})
    await send({"type": "http.response.body", "body": b""})


class KeyCheck:
    """Every path but the open ones is closed without a key, when there are keys; also those that do not exist."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._keys, self._serving = app, serving.keys, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys is not None and not _is_open(scope):
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            key = bearer(given[0].decode("latin-1")) if len(given) == 1 else None
            tenant = None if key is None else self._keys.find(key)
            if tenant is None:
                raise ApiError(
                    401,
                    "this server needs an API key: send it as Authorization: Bearer KEY"
                    if key is None
                    else "this API key is not known here",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            _state(scope)["tenant"] = tenant
            if scope["path"] not in WATCHED:
                self._serving.check_rate(tenant)
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    """Health, and the files of the Lab's page: a browser can send a key only once it has the page that asks for it."""
    path = scope["path"]
    files = path == "/lab" or (path.startswith("/lab/") and "/" not in path.removeprefix("/lab/"))
    return path == "/health" or (files and scope["method"] in ("GET", "HEAD"))


def _state(scope: Scope) -> dict[str, Any]:
    return scope.setdefault("state", {})
