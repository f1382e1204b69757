"""The key check: API keys, and how often the tenant of each may call."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from headway.server.errors import ApiError, route_path
from headway.server.keys import bearer_key
from headway.server.serving import Serving

OPEN_PATHS = ("/health", "/v1/health", "/ping")
"""Paths that need no key."""

POLLED_PATHS = frozenset(
    {*OPEN_PATHS, "/metrics", "/stats", "/load", "/lab/api/model", "/lab/api/pages", "/lab/api/steps"}
)
"""Paths that monitors poll: neither rate-limited nor, while they succeed, logged."""


FILE = re.compile(r"/(lab|lab/client|home)/[^/]*")  # of a page
KEY_HEADERS = (b"authorization", b"x-api-key")


class KeyCheck:
    """Requires a key for every path, existing or not, except the open ones. Does nothing on a server without keys."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._keys, self._serving = app, serving.keys, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._keys is not None and not _is_open(scope):
            key = _key(scope)
            tenant = None if key is None else self._keys.find(key)
            if tenant is None:
                raise ApiError(
                    401,
                    "this server requires an API key; send it as Authorization: Bearer KEY, or as x-api-key"
                    if key is None
                    else "this API key is not valid",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope.setdefault("state", {})["tenant"] = tenant
            if scope["type"] == "http" and route_path(scope) not in POLLED_PATHS:
                self._serving.check_rate(tenant)
        await self._app(scope, receive, send)


def _key(scope: Scope) -> str | None:
    """The one key of a request: a bearer's, or as Anthropic's clients send it."""
    values = [(name, value.decode("latin-1")) for name, value in scope["headers"] if name in KEY_HEADERS]
    if len(values) != 1:
        return None
    ((name, value),) = values
    return bearer_key(value) if name == b"authorization" else value.strip(" ") or None


def _is_open(scope: Scope) -> bool:
    """Whether a path needs no key: health, ping, and the files of pages, which ask for the key themselves."""
    path = route_path(scope)
    if scope["type"] == "websocket":  # browsers cannot send the header: the first message has the key
        return all(name not in KEY_HEADERS for name, _ in scope["headers"])
    files = path == "/lab" or FILE.fullmatch(path)
    return path in OPEN_PATHS or ((files or path == "/") and scope["method"] in ("GET", "HEAD"))
