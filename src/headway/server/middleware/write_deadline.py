"""A limit for clients that do not read: their connection is aborted when too little of what was sent leaves it."""

from __future__ import annotations

import asyncio
import socket
import struct

MIN_READ_RATE = 1024  # bytes per second that a client must read


class WriteDeadline:
    """Aborts a connection whose client has read almost nothing for `timeout` seconds while it is started."""

    def __init__(self, transport: asyncio.WriteTransport, timeout: float) -> None:
        self._transport, self._timeout = transport, timeout
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watch what is unsent now, if there is anything."""
        self.stop()
        if unsent := self._transport.get_write_buffer_size():
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._check, unsent)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, before: int) -> None:
        """Abort the connection unless the client read enough since the last check."""
        expected = min(before, max(1, int(MIN_READ_RATE * self._timeout)))
        if before - self._transport.get_write_buffer_size() < expected:
            self._timer = None
            abort(self._transport)
        else:
            self.start()


def abort(transport: asyncio.WriteTransport) -> None:
    """Close a connection now, and have the kernel discard what was not sent."""
    handle = transport.get_extra_info("socket")
    if handle is not None:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
