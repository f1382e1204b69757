"""The two ways to a session: a WebSocket of the HTTP server, and a Unix socket. Both carry the same messages."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from headway.base.errors import InvalidInput
from headway.base.json_text import PIECE
from headway.remote.protocol.codec import decode, decode_text
from headway.remote.protocol.limits import PATH
from headway.server.middleware.write_deadline import WriteDeadline
from headway.server.serving import Serving
from headway.server.sessions.outbox import SessionClosed
from headway.server.sessions.registry import REASON_BYTES
from headway.server.settings import ServerSettings

CLOSED = {"bye": 1000, "draining": 1001, "malformed": 1007, "too_large": 1009}  # WebSocket codes; others are 1008
TOO_LARGE = CLOSED["too_large"]
LENGTH = 8  # bytes of a frame's length on a Unix socket


class WebSocketLink:
    """A session's messages as frames of a WebSocket: binary, or text where they have no arrays."""

    def __init__(self, websocket: WebSocket) -> None:
        self._socket = websocket

    async def receive(self) -> tuple[dict[str, Any], int]:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            if message.get("code") == TOO_LARGE:
                raise SessionClosed("too_large", "a message was larger than max_message_bytes")
            raise ConnectionError("the WebSocket was closed")
        if (data := message.get("bytes")) is not None:
            return await _message(decode, data), len(data)
        text = message.get("text") or ""
        return await _message(decode_text, text), len(text)

    async def send(self, frame: bytes) -> None:
        with _connection_errors():
            await self._socket.send_bytes(frame)

    async def close(self, reason: str, message: str) -> None:
        text = f"{reason}: {message}".encode()[:REASON_BYTES].decode(errors="ignore")
        with _connection_errors():
            await self._socket.close(CLOSED.get(reason, 1008), text)


async def _message(read: Callable[..., dict[str, Any]], data: bytes | str) -> dict[str, Any]:
    """A message of a client, read in a thread if it is large."""
    if len(data) <= PIECE:
        return read(data, bounded=True)
    return await asyncio.to_thread(read, data, bounded=True)


class _connection_errors:
    """What Starlette and uvicorn raise for a WebSocket that is gone, as `ConnectionError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WebSocketDisconnect | RuntimeError | OSError):
            raise ConnectionError(str(error)) from None


class UnixLink:
    """A session's messages on a stream: each frame after its length.

    With `settings` a client has to send a message to its end within body_timeout, and to read within write_timeout; a
    program that runs here has limits of its own.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit: int,
        settings: ServerSettings | None = None,
    ) -> None:
        self._reader, self._writer, self._limit = reader, writer, limit
        self._body_timeout = None if settings is None else settings.body_timeout
        self._write_timeout = None if settings is None else settings.write_timeout

    async def receive(self) -> tuple[dict[str, Any], int]:
        try:
            first = await self._reader.readexactly(1)
            async with asyncio.timeout(self._body_timeout):
                size = int.from_bytes(first + await self._reader.readexactly(LENGTH - 1), "little")
                if size > self._limit:
                    raise SessionClosed("too_large", f"the message has {size} bytes; at most {self._limit} are allowed")
                frame = await self._reader.readexactly(size)
        except TimeoutError:
            text = f"a message began, and its rest did not come within {self._body_timeout:g} s"
            raise SessionClosed("malformed", text) from None
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionError(str(error)) from None
        return await _message(decode, frame), size

    async def send(self, frame: bytes) -> None:
        with _connection_errors():
            self._writer.write(len(frame).to_bytes(LENGTH, "little") + frame)
            with self._deadline():
                await self._writer.drain()

    async def close(self, reason: str, message: str) -> None:
        with suppress(OSError):
            self._writer.close()
            with self._deadline():
                await self._writer.wait_closed()

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """The client reads what was written, or its connection is aborted."""
        if self._write_timeout is None:
            yield
            return
        deadline = WriteDeadline(self._writer.transport, self._write_timeout)
        deadline.start()
        try:
            yield
        finally:
            deadline.stop()


async def _session(websocket: WebSocket) -> None:
    """The middleware has checked the Host, the Origin and the key, if the headers have one."""
    serving: Serving = websocket.app.state.serving
    await websocket.accept()
    await serving.sessions.serve(WebSocketLink(websocket), websocket.scope.get("state", {}).get("tenant"))


def session_route() -> WebSocketRoute:
    """The route of sessions over a WebSocket."""
    return WebSocketRoute(PATH, _session)


def is_answered(path: Path) -> bool:
    """Whether somebody listens at this Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def listen_for_sessions(path: Path) -> socket.socket:
    """A Unix socket for this user alone. One that nobody listens to any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        if path.is_socket() and not is_answered(path):
            path.unlink()  # of a server that is gone
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise InvalidInput(
            f"cannot listen on {str(path)!r}: {error.strerror or error}; choose another --session-socket"
        ) from None
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


class UnixListener:
    """Sessions over a Unix socket: a file that only its owner may use, gone with the server."""

    def __init__(self, serving: Serving, path: Path, listener: socket.socket | None = None) -> None:
        self._serving, self._path, self._listener = serving, path, listener
        self._server: asyncio.AbstractServer | None = None
        self._talks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> UnixListener:
        listener = self._listener or listen_for_sessions(self._path)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            settings = self._serving.settings
            link = UnixLink(reader, writer, settings.max_body_bytes, settings)
            if len(self._talks) > settings.max_connections:
                await self._serving.sessions.refuse(link, "this server has too many connections; try again later")
            else:
                await self._serving.sessions.serve(link, None)
        except asyncio.CancelledError:
            return  # the server exits; asyncio would log it as an error of its own
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
