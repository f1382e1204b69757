"""MCP over streamable HTTP: each message is a POST on a connection of its own, to an address that was checked before.

Redirects are not followed, and no proxy is used. A response is JSON, or a stream of events that is read up to the
message that answers.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import h11

from headway.base.http_connection import READ_BYTES, HttpConnection, NoResponse, ResponseHead
from headway.server.mcp import messages
from headway.server.mcp.addresses import McpUrl
from headway.server.mcp.messages import TRANSPORT, McpError

END_SECONDS = 2.0  # to tell a server that its session is over


class HttpTransport:
    """One session with the server of a URL."""

    def __init__(self, url: McpUrl, address: str, headers: Mapping[str, str], *, max_bytes: int) -> None:
        self._url, self._address, self._headers, self._max_bytes = url, address, dict(headers), max_bytes
        self._session: str | None = None
        self.version: str | None = None  # that the server chose
        self._ids = 0

    async def request(self, method: str, params: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        """The result of a request."""
        self._ids += 1
        id = self._ids
        with _in_time(seconds):
            async with asyncio.timeout(seconds), self._post(messages.request(id, method, params)) as (head, body):
                if method == "initialize":
                    self._session = _session_id(head)
                if head.media_type == "application/json":
                    message = messages.parse(b"".join([piece async for piece in body]))
                    return messages.result_of(_with_id(message, id))
                if head.media_type != "text/event-stream":
                    raise McpError(f"it sent {messages.shown(head.media_type)!r}, not JSON or events", kind=TRANSPORT)
                async for data in _events(body):
                    message = messages.parse(data)
                    if message.get("id") == id and "method" not in message:
                        return messages.result_of(message)
                raise McpError("its stream ended without a response", kind=TRANSPORT)

    async def notify(self, method: str, params: Mapping[str, Any], seconds: float) -> None:
        with _in_time(seconds):
            async with asyncio.timeout(seconds), self._post(messages.notification(method, params)):
                pass

    async def close(self) -> None:
        """End the session, if the server has one; it need not know."""
        if self._session is not None:
            with suppress(McpError, TimeoutError):
                async with asyncio.timeout(END_SECONDS), self._exchange("DELETE", b""):
                    pass

    @asynccontextmanager
    async def _post(self, data: bytes) -> AsyncIterator[tuple[ResponseHead, AsyncIterator[bytes]]]:
        async with self._exchange("POST", data) as (head, body):
            if 300 <= head.status < 400:
                raise McpError("it redirects, which is not followed", kind=TRANSPORT, code=head.status)
            if not 200 <= head.status < 300:
                raise McpError(f"it answered with the status {head.status}", kind=TRANSPORT, code=head.status)
            if head.headers.get("content-encoding", "identity") != "identity":
                raise McpError("it sent a compressed body, which was not asked for", kind=TRANSPORT)
            yield head, body

    @asynccontextmanager
    async def _exchange(self, method: str, data: bytes) -> AsyncIterator[tuple[ResponseHead, AsyncIterator[bytes]]]:
        """The head of a response, and its body as it comes."""
        connection: HttpConnection | None = None
        try:
            connection = HttpConnection(*await self._connect())
            head, body = await connection.exchange(method, self._url.target, self._all_headers(), data)
            yield head, _bounded(body, self._max_bytes)
        except ssl.SSLError as error:
            raise McpError(f"TLS fails: {messages.shown(error.reason or str(error))}", kind=TRANSPORT) from None
        except h11.ProtocolError:
            raise McpError("it does not speak HTTP/1.1 as it should", kind=TRANSPORT) from None
        except NoResponse:
            raise McpError("it ended the connection without a response", kind=TRANSPORT) from None
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise McpError(f"cannot connect: {error.strerror or type(error).__name__}", kind=TRANSPORT) from None
        finally:
            if connection is not None:
                connection.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls: dict[str, Any] = {}
        if self._url.scheme == "https":
            tls = {"ssl": await asyncio.to_thread(ssl.create_default_context), "server_hostname": self._url.host}
        return await asyncio.open_connection(self._address, self._url.port, limit=READ_BYTES, **tls)

    def _all_headers(self) -> list[tuple[str, str]]:
        own = {
            "host": self._url.host_header,
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "user-agent": "headway",
            "connection": "close",
        }
        if self._session is not None:
            own["mcp-session-id"] = self._session
        if self.version is not None:
            own["mcp-protocol-version"] = self.version
        given = {name.lower(): value for name, value in self._headers.items()}
        given.pop("content-length", None)
        return list((given | own).items())


class _in_time:
    """A request that takes too long is an `McpError`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, TimeoutError):
            raise McpError(f"it did not answer within {self._seconds:g} s", kind=TRANSPORT, code=408) from None


async def _bounded(body: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """The pieces of a body of at most `limit` bytes."""
    size = 0
    async for piece in body:
        size += len(piece)
        if size > limit:
            raise McpError(f"it sent more than {limit} bytes", kind=TRANSPORT)
        yield piece


async def _events(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events. The last line, which may still grow, is kept in pieces."""
    data: list[bytes] = []
    async for line in _lines(body):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and any(data):
            yield b"\n".join(data)
            data = []


async def _lines(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest: list[bytes] = []
    async for piece in body:
        first, *others = piece.split(b"\n")
        rest.append(first)
        for line in others:
            yield b"".join(rest).removesuffix(b"\r")
            rest = [line]
    yield b"".join(rest)


def _with_id(message: Mapping[str, Any], id: int) -> Mapping[str, Any]:
    if message.get("id") != id and "error" not in message:
        raise McpError("it answered another request than the one it got")
    return message


def _session_id(head: ResponseHead) -> str | None:
    id = head.headers.get("mcp-session-id")
    if id is not None and not (0 < len(id) <= 1024 and id.isascii() and id.isprintable()):
        raise McpError("its session has an id that is not valid")
    return id
