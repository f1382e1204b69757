"""One WebSocket: uvicorn's, with the limits that it lacks.

a client that does not read                    aborted after write_timeout, as over HTTP
a client that does not answer a close frame    closed after header_timeout
pings of a client that does not read           not answered: replies would pile up
a message in many small pieces                 takes the memory of its bytes, not of its pieces
"""

from __future__ import annotations

from asyncio import BaseTransport, WriteTransport
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from headway.server.middleware.write_deadline import WriteDeadline
from headway.server.settings import ServerSettings


def websocket_class(settings: ServerSettings) -> type[WebSocketsSansIOProtocol]:
    """A WebSocket class for uvicorn with these settings."""
    return type("WebSocketConnection", (_LimitedWebSocket,), {"settings": settings})


class _LimitedWebSocket(WebSocketsSansIOProtocol):
    settings: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = self.settings.header_timeout

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._write_deadline = WriteDeadline(cast(WriteTransport, transport), self.settings.write_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._write_deadline.stop()
        super().connection_lost(exc)

    # -- reading ---------------------------------------------------------------------------------------------------

    def handle_cont(self, event: Frame) -> None:
        """Join the pieces as they come: a list of them would take many times their bytes, or grow with empty ones."""
        (begun,) = self.frames
        joined = begun if isinstance(begun, bytearray) else bytearray(begun)
        joined += event.data
        self.frames = [joined]  # type: ignore[list-item]
        if event.fin:
            self.frames = [bytes(joined)]
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    # -- writing ---------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.loop.call_soon(self._start_write_timer)  # once everything being written is in the buffer

    def resume_writing(self) -> None:
        self._write_deadline.stop()
        super().resume_writing()

    def _start_write_timer(self) -> None:
        if not self.writable.is_set():
            self._write_deadline.start()
