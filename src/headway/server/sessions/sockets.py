"""The two ways to a session: a WebSocket of the HTTP server, and a Unix socket. Both carry the same messages."""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from headway.base.errors import InvalidInput
from headway.remote.codec import decode, decode_text
from headway.remote.limits import PATH
from headway.server.serving import Serving
from headway.server.sessions.outbox import SessionClosed
from headway.server.sessions.registry import REASON_BYTES

CLOSED = {"bye": 1000, "draining": 1001, "malformed": 1007, "too_large": 1009}  # WebSocket codes; others are 1008
TOO_LARGE = CLOSED["too_large"]
LENGTH = 8  # bytes of a frame's length on a Unix socket


class WebSocketLink:
    """A session's messages as frames of a WebSocket: binary, or text where they have no arrays."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def receive(self) -> tuple[dict[str, Any], int]:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            if message.get("code") == TOO_LARGE:
                raise SessionClosed("too_large", "a message was larger than max_message_bytes")
            raise ConnectionError("the WebSocket was closed")
        if (data := message.get("bytes")) is not None:
            return decode(data), len(data)
        text = message.get("text") or ""
        return decode_text(text), len(text)

    async def send(self, frame: bytes) -> None:
        with _connection_errors():
            await self._socket.send_bytes(frame)

    async def close(self, reason: str, message: str) -> None:
        text = f"{reason}: {message}".encode()[:REASON_BYTES].decode(errors="ignore")
        with _connection_errors():
            await self._socket.close(CLOSED.get(reason, 1008), text)


class _connection_errors:
    """What Starlette and uvicorn raise for a WebSocket that is gone, as `ConnectionError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WebSocketDisconnect | RuntimeError | OSError):
            raise ConnectionError(str(error)) from None


class UnixLink:
    """A session's messages on a stream: each frame after its length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        self._reader, self._writer, self._limit = reader, writer, limit

    async def receive(self) -> tuple[dict[str, Any], int]:
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH), "little")
            if size > self._limit:
                raise SessionClosed("too_large", f"the message has {size} bytes; at most {self._limit} are allowed")
            return decode(await self._reader.readexactly(size)), size
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionError(str(error)) from None

    async def send(self, frame: bytes) -> None:
        with _connection_errors():
            self._writer.write(len(frame).to_bytes(LENGTH, "little") + frame)
            await self._writer.drain()

    async def close(self, reason: str, message: str) -> None:
        with suppress(OSError):
            self._writer.close()
            await self._writer.wait_closed()


async def _session(socket: WebSocket) -> None:
    """The middleware has checked the Host, the Origin and the key, if the headers have one."""
    serving: Serving = socket.app.state.serving
    await socket.accept()
    await serving.sessions.serve(WebSocketLink(socket), socket.scope.get("state", {}).get("tenant"))


def session_route() -> WebSocketRoute:
    """The route of sessions over a WebSocket."""
    return WebSocketRoute(PATH, _session)


class UnixListener:
    """Sessions over a Unix socket: a file that only its owner may use, gone with the server."""

    def __init__(self, serving: Serving, path: Path) -> None:
        self._serving, self._path = serving, path
        self._server: asyncio.AbstractServer | None = None
        self._talks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> UnixListener:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.stat().st_mode):
                self._path.unlink()  # of a server that is gone
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        except OSError as error:
            raise InvalidInput(f"cannot listen on {str(self._path)!r}: {error.strerror or error}") from None
        finally:
            os.umask(before)
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            limit = self._serving.settings.max_body_bytes
            await self._serving.sessions.serve(UnixLink(reader, writer, limit), None)
        finally:
            self._talks.discard(task)
            writer.close()

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._talks):
            task.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        with suppress(FileNotFoundError):
            self._path.unlink()
