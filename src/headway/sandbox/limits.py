"""What one program may use, and how its messages are framed: the same on both sides of a worker."""

from __future__ import annotations

import json
import socket
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput

LENGTH = 8  # bytes of a frame's length, little endian
MIB = 1 << 20
MARGIN = 200  # levels of nesting that are left for what a value is put into, and for the stacks on which it is written


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program."""

    memory: int = 256 * MIB  # bytes
    cpu: float = 60.0  # seconds
    message: int = 8 * MIB  # bytes of a message, and of what it returns


def send_frame(to: socket.socket, frame: bytes) -> None:
    """A frame after its length; waits while the other side is behind."""
    to.sendall(len(frame).to_bytes(LENGTH, "little"))
    to.sendall(frame)


def receive_frame(of: socket.socket) -> bytes | None:
    """The next frame; None at the end."""
    head = receive_exactly(of, LENGTH)
    return None if head is None else receive_exactly(of, int.from_bytes(head, "little"))


def receive_exactly(of: socket.socket, size: int) -> bytes | None:
    """So many bytes; None when it ends before."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        n = of.recv_into(view[got:])
        if n == 0:
            return None
        got += n
    return bytes(data)


def json_text(value: Any) -> str:
    """A value of a program as JSON; raises if it is nested so deeply that another stack could not read or write it."""
    inside = value
    for _ in range(MARGIN):
        inside = [inside]
    try:
        return json.dumps(inside)[MARGIN:-MARGIN]
    except RecursionError:
        raise InvalidInput("the value is nested too deeply; make it flatter") from None


def send_json(to: socket.socket, value: Any) -> None:
    """A value as a frame."""
    send_frame(to, json.dumps(value).encode())
