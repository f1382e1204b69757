"""Messages from the controlling process to its ranks: json and arrays in shared memory, a socket that says where.

    controller ──▶ half A or B of one buffer ◀── every rank reads          a frame of 32 bytes on each rank's socket
                   ranks count what they have read at its beginning        says which message, where and how long

The buffer has no name: it goes with the last process that has it open. Nothing is pickled. The controller writes to a
half again when every rank has read what was there. A rank answers on its socket, in lines of json.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headway.base.dataclass import dataclass

COUNTER, HEADER = 64, 64 * 1024  # bytes between two ranks' counters, and of all of them
FIRST_SIZE = 1 << 20  # bytes of a half, before a message needs more
ALIGN = 64
FRAME = struct.Struct("<QQQQ")  # number, offset, length, size of the buffer
COUNT = struct.Struct("<Q")
SHORT_WAIT = 0.0002  # seconds between two looks at the counters
DTYPES = frozenset(("bool", "uint8", "uint16", "uint64", "int32", "int64", "float16", "float32", "float64"))


@dataclass(frozen=True, eq=False)
class RankMessage:
    """What the controller tells its ranks: a kind, plain values and arrays."""

    kind: str
    values: Mapping[str, Any]
    arrays: Sequence[np.ndarray]


def encoded(message: RankMessage) -> tuple[bytes, list[np.ndarray], list[int], int]:
    """A message's head, its arrays, where each lies after the beginning of the message, and the length of it all."""
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    table = [[str(array.dtype), list(array.shape)] for array in arrays]
    assert all(kind in DTYPES for kind, _ in table), table
    head = json.dumps([message.kind, message.values, table]).encode()
    offsets, end = [], _aligned(COUNT.size + len(head))
    for array in arrays:
        offsets.append(end)
        end = _aligned(end + array.nbytes)
    return head, arrays, offsets, end


def decoded(data: memoryview) -> RankMessage:
    """The message in these bytes; its arrays are views of them."""
    (length,) = COUNT.unpack_from(data)
    kind, values, table = json.loads(bytes(data[COUNT.size : COUNT.size + length]))
    arrays, at = [], _aligned(COUNT.size + length)
    for dtype, shape in table:
        if dtype not in DTYPES:
            raise ValueError(f"an array of {dtype!r}")
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape))
        at = _aligned(at + count * np.dtype(dtype).itemsize)
    return RankMessage(kind, values, arrays)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def new_buffer() -> int:
    """The descriptor of shared memory that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headway-ranks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # deleted as it is made
        return os.dup(file.fileno())


class Sender:
    """The controller's side. `check` raises if a rank has ended; it is called while the sender waits."""

    def __init__(self, memory: int, sockets: Sequence[socket.socket], check: Callable[[], None]) -> None:
        self._memory, self._sockets, self._check = memory, sockets, check
        self._half, self._sent = FIRST_SIZE, 0
        os.ftruncate(memory, HEADER + 2 * self._half)
        self._map = mmap.mmap(memory, HEADER + 2 * self._half)

    def send(self, message: RankMessage) -> None:
        """Have every rank read a message, after those before it. What the arrays hold may change afterwards."""
        head, arrays, offsets, length = encoded(message)
        if length > self._half:
            self._grow(length)
        self._sent += 1
        self._wait_for(self._sent - 2)
        start = HEADER + (self._sent % 2) * self._half
        COUNT.pack_into(self._map, start, len(head))
        self._map[start + COUNT.size : start + COUNT.size + len(head)] = head
        for array, offset in zip(arrays, offsets, strict=True):
            if array.nbytes:
                target = np.frombuffer(self._map, np.uint8, array.nbytes, start + offset)
                target[:] = array.reshape(-1).view(np.uint8)
                del target  # the map can be closed
        frame = FRAME.pack(self._sent, start, length, len(self._map))
        for each in self._sockets:
            each.sendall(frame)

    def _wait_for(self, number: int) -> None:
        """Until every rank has read message `number`."""
        while any(self._read(i) < number for i in range(len(self._sockets))):
            self._check()
            time.sleep(SHORT_WAIT)

    def _read(self, i: int) -> int:
        return COUNT.unpack_from(self._map, i * COUNTER)[0]

    def _grow(self, length: int) -> None:
        self._wait_for(self._sent)
        self._half = 1 << (length - 1).bit_length()
        os.ftruncate(self._memory, HEADER + 2 * self._half)
        self._map.close()
        self._map = mmap.mmap(self._memory, HEADER + 2 * self._half)

    def close(self) -> None:
        self._map.close()


class Receiver:
    """A rank's side."""

    def __init__(self, rank: int, memory: int, connection: socket.socket) -> None:
        self._rank, self._memory, self._socket = rank, memory, connection
        self._map = mmap.mmap(memory, HEADER + 2 * FIRST_SIZE)

    def receive(self) -> RankMessage | None:
        """The next message; None when the controller has ended."""
        frame = self._frame()
        if frame is None:
            return None
        number, start, length, size = FRAME.unpack(frame)
        if size != len(self._map):
            self._map.close()
            self._map = mmap.mmap(self._memory, size)
        data = bytearray(self._map[start : start + length])  # a copy: the next message but one is written there
        COUNT.pack_into(self._map, (self._rank - 1) * COUNTER, number)
        return decoded(memoryview(data))

    def _frame(self) -> bytes | None:
        frame = b""
        while len(frame) < FRAME.size:
            try:
                part = self._socket.recv(FRAME.size - len(frame))
            except ConnectionError:
                return None
            if not part:
                return None
            frame += part
        return frame

    def answer(self, **values: Any) -> None:
        """Tell the controller something."""
        self._socket.sendall(json.dumps(values).encode() + b"\n")
