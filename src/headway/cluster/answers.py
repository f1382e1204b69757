"""The response of a replica on its way to the client: begun, streamed, ended with its lease.

It is read far enough before anything is sent that a refusal or a lost replica can be tried elsewhere. What is lost
later ends with an error event of the API that was asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.cluster.leases import HeldLease
from headway.server.errors import ApiError, error_body, route_path

BUFFERED = 4 << 20  # bytes of a response that is read whole before it is sent on, so that it can be tried elsewhere
ELSEWHERE = ("draining", "loading", "dead", "failed", "stuck", "closed", "queue_full")  # codes worth another replica
LOST = "the replica that computed this response was lost; send the request again"
OWN = frozenset({"connection", "keep-alive", "transfer-encoding", "x-request-id", "x-content-type-options", "date"})


class Answer(Response):
    """The response of a replica: its beginning is read before any of it is sent, so that it can be tried elsewhere."""

    def __init__(self, held: Any, lease: HeldLease, on_lost: Callable[[], None]) -> None:
        self._held, self._lease, self._on_lost = held, lease, on_lost
        self._watch = asyncio.create_task(lease.lost())
        self._source: aiohttp.ClientResponse | None = None
        self._first, self._whole, self._closed = b"", False, False
        self.background = None

    @property
    def replica(self) -> str:
        return self._lease.lease.replica

    async def begin(self, request: Any) -> None:
        """Wait for the response's first bytes; for all of them where they are few or no stream."""
        self._source = source = await self._or_lost(request.__aenter__())
        self.status_code = source.status
        streams = source.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson"))
        if streams:
            self._first = await self._or_lost(source.content.readany())
            return
        pieces, size = list[bytes](), 0
        while size < BUFFERED and (piece := await self._or_lost(source.content.readany())):
            pieces.append(piece)
            size += len(piece)
        self._first, self._whole = b"".join(pieces), size < BUFFERED

    @property
    def is_refused(self) -> bool:
        """Whether another replica may take what this one has refused."""
        if self.status_code not in (429, 503) or not self._whole:
            return False
        try:
            error = json.loads(self._first).get("error")
            code = error.get("code") if isinstance(error, dict) else None
        except (ValueError, AttributeError):
            return False
        return code in ELSEWHERE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._source is not None
        try:
            headers = [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in self._source.headers.items()
                if name.lower() not in OWN
            ]
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": not self._whole})
            if not self._whole:
                await self._stream(scope, send)
        finally:
            await self.close()

    async def _stream(self, scope: Scope, send: Send) -> None:
        assert self._source is not None
        try:
            while piece := await self._or_lost(self._source.content.readany()):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError):
            self._on_lost()
            scope.setdefault("state", {})["error_event"] = _event_writer(route_path(scope))
            raise ApiError(503, LOST, code="replica_lost", headers={"Retry-After": "1"}) from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _or_lost(self, work: Any) -> Any:
        """What is awaited, unless the replica is lost first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # what it sent before may still be on its way
                await asyncio.wait({task}, timeout=1.0)
            if not task.done():
                raise ConnectionError("the replica has ended the lease")
            return task.result()
        finally:
            if not task.done():
                task.cancel()

    async def close(self) -> None:
        """End the request and its lease."""
        if self._closed:
            return
        self._closed = True
        if self._source is not None:
            self._source.close() if not self._whole else self._source.release()
        self._watch.cancel()
        await self._held.__aexit__(None, None, None)


def _event_writer(path: str) -> Callable[[ApiError], bytes]:
    """How a stream of this path tells of an error."""
    if path.startswith("/api/"):
        return lambda error: error_body(error, path) + b"\n"
    if path.startswith("/v1/messages"):
        return lambda error: b"event: error\ndata: " + error_body(error, path) + b"\n\n"
    if path.startswith("/v1/responses"):
        return lambda error: (
            b"event: error\ndata: "
            + json.dumps({"type": "error", "code": error.code, "message": error.message, "param": None}).encode()
            + b"\n\n"
        )
    return lambda error: b"data: " + error_body(error, path) + b"\n\n"
