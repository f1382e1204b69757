"""The start of a TLS connection: a handshake with a limit in time and in number, before there is an HTTP connection.

    a handshake that is not finished               aborted after header_timeout
    more of them than there may be connections     aborted at once, without an answer: it could not be read

A handshake counts as a connection, so that those who finish theirs get a 503 when there are too many; a server that
exits aborts it.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from headway.server.settings import ServerSettings

SPARE = 64  # connections over the limit that still get a 503


def tls_class(settings: ServerSettings, connection: type[H11Protocol]) -> type[asyncio.Protocol]:
    """A connection class for uvicorn that speaks TLS and then hands over to `connection`."""
    assert settings.ssl_certfile is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    return type("Handshake", (_Handshake,), {"settings": settings, "context": context, "connection": connection})


class _Handshake(asyncio.Protocol):
    settings: ServerSettings
    context: ssl.SSLContext
    connection: type[H11Protocol]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made = lambda: self.connection(*args, **kwargs)
        self._connections: set[Any] = kwargs["server_state"].connections
        self._early = bytearray()  # what a client sends along with the end of its handshake
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self._connections) >= self.settings.max_connections + SPARE:
            return transport.abort()
        transport.pause_reading()  # until the handshake reads
        self._transport = transport
        self._connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._shake())

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None

    def shutdown(self) -> None:
        """Called when the server exits."""
        if self._transport is not None:
            self._transport.abort()

    async def _shake(self) -> None:
        plain, limit = self._transport, self.settings.header_timeout
        assert plain is not None
        secure: asyncio.Transport | None = None
        with suppress(OSError):  # it is no TLS, took too long, or was cut
            secure = await asyncio.get_running_loop().start_tls(
                plain, self, self.context, server_side=True, ssl_handshake_timeout=limit, ssl_shutdown_timeout=limit
            )
        is_open = self._transport is not None
        self._connections.discard(self)
        if secure is None or not is_open:
            return plain.abort()
        connection = self._made()
        connection.connection_made(secure)
        secure.set_protocol(connection)
        if self._early:
            connection.data_received(bytes(self._early))
