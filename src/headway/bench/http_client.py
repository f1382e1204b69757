"""A small HTTP client for measuring servers.

Connections are kept alive for the next request. Leaving a response before its end closes its connection, as a client
that disconnects does.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import field
from typing import Any
from urllib.parse import urlsplit

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.http_connection import READ_BYTES, HttpConnection


@dataclass(frozen=True)
class Address:
    """A server's host and port, and the API key to send."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # of every path
    key: str | None = field(default=None, repr=False)

    @staticmethod
    def of(url: str, key: str | None = None) -> Address:
        """The address in a URL such as http://127.0.0.1:8000."""
        wrong = InvalidInput(f"--url is {url!r}; it must be an address like http://127.0.0.1:8000")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise wrong from None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
            raise wrong
        tls = parts.scheme == "https"
        return Address(host, port or (443 if tls else 80), tls, parts.path.rstrip("/"), key)

    @property
    def headers(self) -> list[tuple[str, str]]:
        name = f"[{self.host}]" if ":" in self.host else self.host
        given = [("Host", f"{name}:{self.port}"), ("Content-Type", "application/json")]
        return given if self.key is None else [*given, ("Authorization", f"Bearer {self.key}")]


class HttpResponse:
    """A response whose headers have arrived; its body is read by `body` or `events`."""

    def __init__(self, status: int, headers: Mapping[str, str], pieces: AsyncIterator[bytes]) -> None:
        self.status, self.headers = status, headers
        self._pieces = pieces

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self._pieces])

    async def events(self) -> AsyncIterator[str]:
        """The data of server-sent events, as they arrive."""
        rest = b""
        async for piece in self._pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip().decode()


class HttpClient:
    """Requests to one server, over as many connections as are in use at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[HttpConnection] = []

    @asynccontextmanager
    async def request(self, method: str, path: str, body: Any = None) -> AsyncIterator[HttpResponse]:
        """One request; leaving it before the response's end closes the connection."""
        connection = await self._connection()
        try:
            where = self.address
            head, pieces = await connection.exchange(method, where.prefix + path, where.headers, _encode(body))
            yield HttpResponse(head.status, head.headers, pieces)
        finally:
            if connection.reset():
                self._idle.append(connection)
            else:
                connection.close()

    async def json(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of a GET; None where the body is not valid JSON."""
        async with self.request("GET", path) as response:
            body = await response.body()
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, None

    async def _connection(self) -> HttpConnection:
        while self._idle:
            if not (kept := self._idle.pop()).is_over:
                return kept
            kept.close()
        where = self.address
        context = ssl.create_default_context() if where.tls else None
        return HttpConnection(*await asyncio.open_connection(where.host, where.port, ssl=context, limit=READ_BYTES))

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


def _encode(body: Any) -> bytes:
    return b"" if body is None else json.dumps(body).encode()
