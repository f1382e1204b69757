"""The host check: the size of the headers, one body length, and a Host that is this server's."""

from __future__ import annotations

import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from headway.server.errors import ApiError
from headway.server.serving import Serving
from headway.server.settings import ANY_HOST, EVERYWHERE, ServerSettings

_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{1,5})?")


class HostCheck:
    """Rejects headers that are too large or give two body lengths, and a Host that is not this server's."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._limit = app, serving.settings.max_header_bytes
        self._hosts = AllowedHosts(serving.settings, has_keys=serving.keys is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            # h11 limits only headers that arrive in several pieces: those in one piece are parsed whatever their size.
            size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            size += len(scope.get("raw_path", b"")) + len(scope["query_string"])
            if size > self._limit:
                raise ApiError(431, f"the request headers have {size} bytes; the limit is {self._limit}")
            names = [name for name, _ in scope["headers"]]
            if b"content-length" in names and b"transfer-encoding" in names:  # a proxy may have used the other one
                raise ApiError(
                    400,
                    "the request has both Content-Length and Transfer-Encoding; send one of them",
                    headers={"Connection": "close"},
                )
            self._hosts.check([value for name, value in scope["headers"] if name == b"host"])
        await self._app(scope, receive, send)


class AllowedHosts:
    """The Host names under which clients may reach this server.

    Always allowed: localhost, loopback addresses, the address the server listens on, and `allowed_hosts`. Beyond
    loopback, IP addresses are allowed too: health checks use them, and no web page has one as its domain. With
    keys and no `allowed_hosts`, any name is allowed: a web page that gets here through its own domain has no key.
    """

    def __init__(self, settings: ServerSettings, *, has_keys: bool) -> None:
        named = {host.lower() for host in settings.allowed_hosts}
        self._any = ANY_HOST in named or (has_keys and not named and not settings.on_loopback)
        self._loopback_only = settings.on_loopback
        self._names = named | {"localhost", settings.host.lower()} - EVERYWHERE

    def check(self, values: list[bytes]) -> None:
        """Raise unless there is exactly one Host, well-formed and allowed."""
        text = values[0].decode("latin-1").lower() if len(values) == 1 else ""
        match = _HOST.fullmatch(text)
        if match is None:
            raise ApiError(400, "the request must have exactly one well-formed Host header", code="invalid_host")
        if not (self._any or match[1] in self._names or self._is_allowed_address(match[1])):
            raise ApiError(
                400,
                "the name in the Host header is not allowed; the server's operator can add it with --allowed-host",
                code="host_not_allowed",
            )

    def _is_allowed_address(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback if self._loopback_only else not address.is_unspecified
