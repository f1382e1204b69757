"""One HTTP connection: uvicorn's, with the limits that it lacks.

    headers that do not arrive, or byte by byte    closed after header_timeout
    more connections than max_connections          503 and closed before anything is read
    a client that does not read the response       aborted after write_timeout, which cancels its request
    a pipelined second request                     not read ahead, so that a disconnect is noticed

Input that is not HTTP gets an OpenAI-style error too.
"""

from __future__ import annotations

import asyncio
import http
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headway.server import logs
from headway.server.errors import ApiError, error_body
from headway.server.middleware.write_deadline import WriteDeadline, abort
from headway.server.settings import ServerSettings


def connection_class(settings: ServerSettings) -> type[H11Protocol]:
    """A connection class for uvicorn with these settings."""
    return type("Connection", (_LimitedConnection,), {"settings": settings})


class _LimitedConnection(H11Protocol):
    settings: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_websocket = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._write_deadline = WriteDeadline(transport, self.settings.write_timeout)
        # Report any unsent bytes, including those left when closing. With TLS a limit of 0 would pause an empty buffer.
        transport.set_write_buffer_limits(high=0 if transport.get_extra_info("ssl_object") is None else 1)
        if len(self.connections) > self.settings.max_connections:
            self._reject(ApiError(503, "this server has too many connections", headers={"Retry-After": "1"}))
        else:
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel(self._header_timer)
        self._write_deadline.stop()
        super().connection_lost(exc)

    # -- reading ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._answering and self.conn.their_state is h11.DONE:
            self._drop_pipelined()
            return
        super().data_received(data)
        if self._is_websocket:
            return
        if self._answering:
            self._cancel(self._header_timer)
            self._header_timer = None
            if self.conn.their_state is h11.DONE and self.flow.read_paused:  # by its body, or by a request after it
                if self.conn.trailing_data[0]:
                    self._drop_pipelined()
                self.flow.resume_reading()
        elif self._header_timer is None and not self.transport.is_closing():
            self._start_header_timer()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """From now on the connection is a WebSocket's, which has timeouts of its own."""
        self._is_websocket = True
        self._cancel(self._header_timer)
        super().handle_websocket_upgrade(event)

    def _drop_pipelined(self) -> None:
        """A pipelined request is dropped with the connection, and the response says so if it has not begun."""
        if self.cycle.keep_alive and not self.cycle.response_started:
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]
        self.cycle.keep_alive = False

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.settings.header_timeout, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        """Called when h11 raises; its exception says more than `msg`."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            msg = f"the request headers are larger than {self.settings.max_header_bytes} bytes"
        self._reject(ApiError(status, msg))

    def _reject(self, error: ApiError) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of a response
            return abort(self.transport)
        body, id = error_body(error), logs.new_request_id()
        logs.info("rejected", request_id=id, status=error.status, **({"client": self.client[0]} if self.client else {}))
        reason = http.HTTPStatus(error.status).phrase
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers |= {"x-request-id": id, "x-content-type-options": "nosniff"}
        lines = [f"HTTP/1.1 {error.status} {reason}", *(f"{k}: {v}" for k, v in (headers | error.headers).items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self.transport.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.loop.call_soon(self._start_write_timer)  # once everything being written is in the buffer

    def resume_writing(self) -> None:
        self._write_deadline.stop()
        super().resume_writing()

    def _start_write_timer(self) -> None:
        if self.flow.write_paused:
            self._write_deadline.start()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
