"""A client of sessions that sends what it likes, over a Unix socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headway.remote.protocol.codec import decode, encode
from support.live import PATIENCE
from support.through import Served

HELLO = {"type": "hello", "version": 1}


class Raw:
    """A client that sends what it likes."""

    def __init__(self, served: Served) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(str(served.path))
        self.sent = 0

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(len(data).to_bytes(8, "little") + data)

    def send(self, **message: Any) -> None:
        self.send_bytes(encode(message))

    def request(self, verb: str, **args: Any) -> None:
        self.sent += 1
        self.send(type="request", n=self.sent, ack=0, id=self.sent, verb=verb, args=args)

    def receive(self) -> dict[str, Any]:
        size = int.from_bytes(self._exactly(8), "little")
        return decode(self._exactly(size))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def closing(self) -> str:
        """Why the server closes the connection, which it then does."""
        while (message := self.receive())["type"] != "close":
            pass
        assert message["message"]
        with pytest.raises(EOFError):
            self.receive()
        return message["reason"]

    def abort(self) -> None:
        self._socket.close()


@contextmanager
def opened(served: Served) -> Iterator[Raw]:
    raw = Raw(served)
    raw.send(**HELLO)
    assert raw.receive()["type"] == "welcome"
    try:
        yield raw
    finally:
        raw.abort()


def until_quiet(served: Served) -> None:
    end = time.monotonic() + PATIENCE
    while served.engine.stats().pages_held and time.monotonic() < end:
        time.sleep(0.02)
    assert served.engine.stats().pages_held == 0
