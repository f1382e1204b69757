"""The client's connections: a WebSocket to an http(s) address, or a Unix socket. Frames in, frames out."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from headway.base.errors import ConnectionFailed, InvalidInput, Unsupported
from headway.base.text import short_repr
from headway.remote.protocol.limits import PATH

LENGTH = 8  # bytes of a frame's length on a Unix socket
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Transport(Protocol):
    """One connection. `receive` and `send` raise `ConnectionError` when it is gone."""

    async def receive(self) -> bytes: ...

    async def send(self, frame: bytes) -> None: ...

    async def close(self) -> None: ...


async def open_transport(url: str, api_key: str | None, timeout: float) -> Transport:
    """Connect; raises `ConnectionFailed` where trying again would not help, and `ConnectionError` otherwise."""
    if url.startswith("fd:"):  # a program that the server has started with this socket
        return await _UnixTransport.inherited(int(url.removeprefix("fd:")))
    if url.startswith("unix:"):
        return await _UnixTransport.open(url.removeprefix("unix:").removeprefix("//"), timeout)
    return await _WebSocketTransport.open(websocket_url(url), api_key, timeout)


def websocket_url(url: str) -> str:
    """The address of a server's sessions."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname or parts.query or parts.username:
        raise InvalidInput(
            f"the server's address is {short_repr(url, 160)}; it must be http://HOST:PORT, https://HOST, "
            "or unix:/FILE, and a key is given as api_key="
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return urlunsplit((scheme, parts.netloc, path + PATH, "", ""))


class _WebSocketTransport:
    def __init__(self, socket: object) -> None:
        self._socket = socket

    @classmethod
    async def open(cls, url: str, api_key: str | None, timeout: float) -> _WebSocketTransport:
        try:
            from websockets.asyncio.client import connect
            from websockets.exceptions import InvalidStatus, WebSocketException
        except ImportError:
            raise Unsupported("connecting to a server needs the package websockets; install it") from None
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        own: Any = {"proxy": None} if urlsplit(url).hostname in LOOPBACK else {}
        try:
            socket = await connect(
                url, additional_headers=headers, max_size=None, compression=None, open_timeout=timeout, **own
            )
        except InvalidStatus as error:
            raise ConnectionFailed(_refused(url, error.response.status_code, bytes(error.response.body))) from None
        except (OSError, TimeoutError, WebSocketException, EOFError) as error:
            raise ConnectionError(f"cannot connect to {url}: {error or type(error).__name__}") from None
        return cls(socket)

    async def receive(self) -> bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            data = await self._socket.recv()  # type: ignore[attr-defined]
        except ConnectionClosed as closed:
            frame = closed.rcvd
            raise ConnectionError("the connection was lost" if frame is None else frame.reason or "closed") from None
        return data if isinstance(data, bytes) else b""

    async def send(self, frame: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(frame)  # type: ignore[attr-defined]
        except ConnectionClosed as closed:
            raise ConnectionError(str(closed)) from None

    async def close(self) -> None:
        await self._socket.close()  # type: ignore[attr-defined]


def _refused(url: str, status: int, body: bytes) -> str:
    """Why a server did not open a WebSocket."""
    try:
        text = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = "is it a Headway server, and recent enough?"
    return f"{url} refused the connection with status {status}: {text}"


class _UnixTransport:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, path: str, timeout: float) -> _UnixTransport:
        try:
            async with asyncio.timeout(timeout):
                return cls(*await asyncio.open_unix_connection(Path(path)))
        except (OSError, TimeoutError) as error:
            raise ConnectionError(f"cannot connect to the socket {path!r}: {error or 'it took too long'}") from None

    @classmethod
    async def inherited(cls, fd: int) -> _UnixTransport:
        try:
            return cls(*await asyncio.open_unix_connection(sock=socket.socket(fileno=fd)))
        except OSError as error:
            raise ConnectionFailed(f"the socket {fd} cannot be used: {error}") from None

    async def receive(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH), "little")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionError(f"the connection was lost: {error}") from None

    async def send(self, frame: bytes) -> None:
        try:
            self._writer.write(len(frame).to_bytes(LENGTH, "little") + frame)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionError(f"the connection was lost: {error}") from None

    async def close(self) -> None:
        self._writer.close()
