"""A small HTTP client for measuring servers: asyncio's streams, and h11, which every server here has anyway.

Connections are kept for the next request. An answer that is left before its end takes its connection along, which is
how a client goes away.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from headway.base.errors import InvalidInput

PIECE = 1 << 16


@dataclass(frozen=True)
class Address:
    """Where a server is, and the key that opens it."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # of every path
    key: str | None = field(default=None, repr=False)

    @staticmethod
    def of(url: str, key: str | None = None) -> Address:
        """The address in a URL such as http://127.0.0.1:8000."""
        wrong = InvalidInput(f"--url is {url!r}; it takes an address such as http://127.0.0.1:8000")
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


class Answer:
    """An answer whose head has come; its body is read by one of these."""

    def __init__(self, status: int, headers: Mapping[str, str], pieces: AsyncIterator[bytes]) -> None:
        self.status, self.headers = status, headers
        self._pieces = pieces

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([piece async for piece in self._pieces])

    async def events(self) -> AsyncIterator[str]:
        """The data of server-sent events, as they come."""
        rest = b""
        async for piece in self._pieces:
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                if line.startswith(b"data:"):
                    yield line[5:].strip().decode()


class Client:
    """Asks one server, over as many connections as are needed at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[_Connection] = []

    @asynccontextmanager
    async def ask(self, method: str, path: str, body: Any = None) -> AsyncIterator[Answer]:
        """One request; leaving it before the answer's end closes the connection."""
        connection = await self._connection()
        try:
            yield await connection.exchange(method, self.address.prefix + path, self.address.headers, _packed(body))
        finally:
            if connection.again():
                self._idle.append(connection)
            else:
                connection.close()

    async def json(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of a GET; None where it is no JSON."""
        async with self.ask("GET", path) as answer:
            body = await answer.body()
        try:
            return answer.status, json.loads(body)
        except ValueError:
            return answer.status, None

    async def _connection(self) -> _Connection:
        while self._idle:
            if not (kept := self._idle.pop()).reader.at_eof():
                return kept
            kept.close()
        where = self.address
        context = ssl.create_default_context() if where.tls else None
        return _Connection(*await asyncio.open_connection(where.host, where.port, ssl=context, limit=PIECE))

    def close(self) -> None:
        """Close the connections that were kept."""
        while self._idle:
            self._idle.pop().close()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    async def exchange(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        length = ("Content-Length", str(len(body)))
        request = h11.Request(method=method, target=path, headers=[*headers, length])
        for part in (request, h11.Data(body), h11.EndOfMessage()):
            self._writer.write(self._http.send(part) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the server closed the connection without an answer")
        found = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        return Answer(event.status_code, found, self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionResetError("the server closed the connection in the middle of an answer")

    async def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self.reader.read(PIECE))
        return event

    def again(self) -> bool:
        """Whether it can be used once more; then it is ready for it."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        self._writer.transport.abort()


def _packed(body: Any) -> bytes:
    return b"" if body is None else json.dumps(body).encode()
