"""Reads the whole request body, within a size and a time limit, before anything is parsed."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server import logs
from headway.server.errors import ApiError
from headway.server.serving import Serving

LOGGED_BYTES = 64 << 10


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


class BodyReader:
    """Reads a body and passes it on in one piece. Also bounds the bytes that all requests hold together."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._settings, self._serving = app, serving.settings, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        pieces: list[bytes] = []
        try:
            await self._read(_content_length(scope), pieces, receive)
            body = b"".join(pieces)
            if self._settings.log_prompts and body:
                logs.info("body", body=body[:LOGGED_BYTES].decode("utf-8", "backslashreplace"))
            await self._app(scope, _replay(body, receive), send)
        except ClientDisconnected:
            return
        finally:
            self._serving.let_go_of_body(sum(map(len, pieces)))

    async def _read(self, declared: int, pieces: list[bytes], receive: Receive) -> None:
        settings = self._settings
        self._check(declared)
        size = 0
        try:
            async with asyncio.timeout(settings.body_timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientDisconnected
                    piece, more = message.get("body", b""), message.get("more_body", False)
                    size += len(piece)
                    self._check(size)
                    if self._serving.body_bytes + len(piece) > settings.max_total_body_bytes:
                        raise ApiError(
                            503,
                            "too many large requests at the same time; try again in 1 s",
                            code="busy",
                            headers={"Retry-After": "1"},
                        )
                    pieces.append(piece)
                    self._serving.body_bytes += len(piece)
        except TimeoutError:
            raise ApiError(
                408, f"the request body did not arrive within {settings.body_timeout:g} s", code="body_timeout"
            ) from None

    def _check(self, size: int) -> None:
        limit = self._settings.max_body_bytes
        if size > limit:
            raise ApiError(
                413,
                f"the request body is larger than {limit} bytes; send less, or have the server's operator raise "
                "--limit max_body_bytes",
                code="body_too_large",
            )


def _content_length(scope: Scope) -> int:
    text = Headers(scope=scope).get("content-length", "0")
    return int(text) if text.isdecimal() else 0  # h11 has already rejected what is not a number


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body in one piece and then waits for the client to disconnect."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
