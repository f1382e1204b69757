"""One HTTP connection: uvicorn's own, with the times and counts it does not watch.

    a head that does not come, or comes byte by byte    header_timeout, then closed
    more connections than max_connections               503 and closed, before anything is read
    a reader that takes nothing                         write_timeout, then cut off, which ends its request
    a second request before the first is answered       never read ahead, so that a client who leaves is noticed

What is no HTTP gets an error in OpenAI's shape too.
"""

from __future__ import annotations

import asyncio
import http
import socket
import struct
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headway.server import access_log as logs
from headway.server.errors import ApiError, error_body
from headway.server.settings import Settings

PROGRESS = 1024  # bytes a second that a reader has to take, at least


def protocol(settings: Settings) -> type[H11Protocol]:
    """uvicorn's connection class with these settings."""
    return type("Connection", (_Connection,), {"settings": settings})


class _Connection(H11Protocol):
    settings: Settings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._dropped = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # told of anything unsent, also of what is left when closing
        if len(self.connections) > self.settings.max_connections:
            self._refuse(ApiError(503, "this server has too many connections", headers={"Retry-After": "1"}))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._head_timer)
        self._stop(self._write_timer)
        super().connection_lost(exc)

    # -- reading ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._answering and self.conn.their_state is h11.DONE:
            self.cycle.keep_alive = False  # what came ahead of its time is dropped with the connection
            return
        super().data_received(data)
        if self._answering:
            self._stop(self._head_timer)
            self._head_timer = None
            if self.conn.their_state is h11.DONE and self.flow.read_paused:
                self.cycle.keep_alive = False
                self.flow.resume_reading()
        elif self._head_timer is None and not self.transport.is_closing():
            self._await_head()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.settings.header_timeout, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        """Called where h11 raised; what it raised says more than the message."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            msg = f"the head of this request is larger than {self.settings.max_header_bytes} bytes"
        self._refuse(ApiError(status, msg))

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of an answer
            return self._cut()
        body, id = error_body(error), logs.new_request_id()
        logs.info("refused", request_id=id, status=error.status, **({"client": self.client[0]} if self.client else {}))
        reason = http.HTTPStatus(error.status).phrase
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers |= {"x-request-id": id, "x-content-type-options": "nosniff"}
        lines = [f"HTTP/1.1 {error.status} {reason}", *(f"{k}: {v}" for k, v in (headers | error.headers).items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self.transport.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.loop.call_soon(self._watch_reader)  # once all of what is being written is in the buffer

    def resume_writing(self) -> None:
        self._stop(self._write_timer)
        self._write_timer = None
        super().resume_writing()

    def _watch_reader(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent and self.flow.write_paused:
            self._stop(self._write_timer)
            self._write_timer = self.loop.call_later(self.settings.write_timeout, self._check_reader, unsent)

    def _check_reader(self, before: int) -> None:
        """Cut a reader off unless it took its share since the last look."""
        share = min(before, max(1, int(PROGRESS * self.settings.write_timeout)))
        if before - self.transport.get_write_buffer_size() < share:
            self._cut()
        else:
            self._watch_reader()

    def _cut(self) -> None:
        """End the connection now. The system must not keep what was not taken either."""
        handle = self.transport.get_extra_info("socket")
        if handle is not None:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
