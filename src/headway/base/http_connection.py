"""A client's connection to an HTTP/1.1 server, on asyncio's streams and h11: one request at a time.

It follows no redirect, uses no proxy and knows no URL. Who opens the streams decides where they lead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import h11

from headway.base.dataclass import dataclass

READ_BYTES = 1 << 16
HEADER_BYTES = 32 << 10


class NoResponse(ConnectionResetError):
    """The server closed the connection before the end of its response."""


@dataclass(frozen=True)
class ResponseHead:
    """The beginning of a response; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]

    @property
    def media_type(self) -> str:
        """What its body is, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class HttpConnection:
    """Requests over one connection, one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES)

    async def exchange(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> tuple[ResponseHead, AsyncIterator[bytes]]:
        """Send a request: the head of the response, and its body as it comes."""
        length = ("Content-Length", str(len(body)))
        request = h11.Request(method=method, target=target, headers=[*headers, length])
        for part in (request, h11.Data(body), h11.EndOfMessage()):
            self._writer.write(self._http.send(part) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise NoResponse("the server closed the connection without a response")
        received = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
        return ResponseHead(event.status_code, received), self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise NoResponse("the server closed the connection in the middle of a response")

    async def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(READ_BYTES))
        return event

    @property
    def is_over(self) -> bool:
        """Whether the server has closed it."""
        return self._reader.at_eof()

    def reset(self) -> bool:
        """Make it ready for another request; whether that is possible."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        self._writer.transport.abort()
