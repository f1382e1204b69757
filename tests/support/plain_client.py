"""A client of sessions from docs/protocol.md alone: the standard library, and nothing of Headway's own client."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CODES = {"<f4": "f", "<f8": "d", "<i4": "i", "<i8": "q", "<u4": "I", "|u1": "B", "|b1": "?"}
SECONDS = 60.0  # until a test gives up


@dataclass(frozen=True)
class Array:
    """An array of a message."""

    type: str
    shape: list[int]
    data: bytes

    @classmethod
    def of(cls, type: str, values: list[Any]) -> Array:
        return cls(type, [len(values)], struct.pack(f"<{len(values)}{CODES[type]}", *values))

    def tolist(self) -> list[Any]:
        code = CODES[self.type]
        return list(struct.unpack(f"<{len(self.data) // struct.calcsize(code)}{code}", self.data))


def to_frame(message: dict[str, Any]) -> bytes:
    arrays: list[bytes] = []

    def written(value: Any) -> Any:
        match value:
            case Array():
                arrays.append(value.data)
                offset = sum(map(len, arrays[:-1]))
                return {"array": [value.type, value.shape, offset, len(value.data)]}
            case dict():
                return {name: written(each) for name, each in value.items()}
            case list():
                return [written(each) for each in value]
        return value

    text = json.dumps(written(message)).encode()
    return b"".join([struct.pack("<I", len(text)), text, *arrays])


def from_frame(frame: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<I", frame)
    arrays = frame[4 + length :]

    def read(value: dict[str, Any]) -> Any:
        if set(value) != {"array"}:
            return value
        type, shape, offset, size = value["array"]
        return Array(type, shape, arrays[offset : offset + size])

    return json.loads(frame[4 : 4 + length], object_hook=read)


class UnixFrames:
    """Frames on a Unix socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SECONDS)
        self._socket.connect(path)

    def send(self, frame: bytes) -> None:
        self._socket.sendall(struct.pack("<Q", len(frame)) + frame)

    def receive(self) -> bytes:
        return self._exactly(struct.unpack("<Q", self._exactly(8))[0])

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def cut(self) -> None:
        self._socket.close()


class WebSocketFrames(UnixFrames):
    """Frames as binary messages of a WebSocket."""

    def __init__(self, host: str, port: int, path: str = "/v1/session") -> None:
        self._socket = socket.create_connection((host, port), SECONDS)
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
        ]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._exactly(1)
        assert head.startswith(b"HTTP/1.1 101"), head

    def send(self, frame: bytes, opcode: int = 2) -> None:
        size = len(frame)
        length = bytes([size]) if size < 126 else struct.pack(*((">BH", 126) if size <= 0xFFFF else (">BQ", 127)), size)
        head = bytes([0x80 | opcode, 0x80 | length[0]]) + length[1:]
        self._socket.sendall(head + bytes(4) + frame)  # masked with zeros

    def receive(self) -> bytes:
        whole = b""
        while True:
            first, size = self._exactly(2)
            if size >= 126:
                size = int.from_bytes(self._exactly(2 if size == 126 else 8), "big")
            data = self._exactly(size)
            match first & 15:
                case 8:
                    raise EOFError(int.from_bytes(data[:2], "big"))
                case 9:
                    self.send(data, 10)
                case 0 | 1 | 2:
                    whole += data
                    if first & 0x80:
                        return whole


class Refused(Exception):
    """The error of a reply."""


class PlainSession:
    """One session: requests, replies, steps, calls; it can be cut and come back."""

    def __init__(self, open: Callable[[], UnixFrames]) -> None:
        self._open, self._frames = open, open()
        self._sent = self._received = self._told = self._number = 0
        self._unacknowledged: dict[int, dict[str, Any]] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self.steps: list[dict[str, Any]] = []
        self.methods: dict[str, Callable[..., Any]] = {"drop": lambda: None}
        self.welcome = self._hello()

    def _hello(self, **more: Any) -> dict[str, Any]:
        self._frames.send(to_frame({"type": "hello", "version": 1, **more}))
        welcome = from_frame(self._frames.receive())
        assert welcome["type"] == "welcome", welcome
        return welcome

    def new(self) -> int:
        self._number += 1
        return self._number

    def post(self, **message: Any) -> None:
        self._sent += 1
        self._told = self._received
        self._unacknowledged[self._sent] = message
        self._frames.send(to_frame({"n": self._sent, "ack": self._received, **message}))

    def request(self, verb: str, *, quiet: bool = False, **args: Any) -> int:
        id = self.new()
        self.post(type="request", id=id, verb=verb, args=args, quiet=quiet)
        return id

    def ask(self, verb: str, **args: Any) -> Any:
        return self.value(self.request(verb, **args))

    def value(self, id: int) -> Any:
        while id not in self._replies:
            self.receive()
        reply = self._replies.pop(id)
        if "error" in reply:
            raise Refused(reply["error"])
        return reply["value"]

    def receive(self) -> None:
        """Take one message."""
        message = from_frame(self._frames.receive())
        if message["type"] == "close":
            raise EOFError(message["reason"])
        self._acknowledged(message["ack"])
        if message["type"] == "ack":
            return
        assert message["n"] == self._received + 1
        self._received += 1
        match message["type"]:
            case "reply":
                self._replies[message["id"]] = message
            case "step":
                self.steps.append(message)
            case "call":
                value = self.methods[message["method"]](*message["args"])
                self.post(type="return", id=message["id"], value=value)
            case "tell":
                self.methods[message["method"]](*message["args"])
        if self._received - self._told >= 32:
            self._told = self._received
            self._frames.send(to_frame({"type": "ack", "ack": self._received}))

    def _acknowledged(self, number: int) -> None:
        self._unacknowledged = {n: message for n, message in self._unacknowledged.items() if n > number}

    def cut(self) -> None:
        """Lose the connection."""
        self._frames.cut()

    def come_back(self) -> None:
        """Lose the connection, and resume the session on another one."""
        self.cut()
        self._frames = self._open()
        welcome = self._hello(resume={"session": self.welcome["session"], "received": self._received})
        self._acknowledged(welcome["received"])
        for n, message in self._unacknowledged.items():
            self._frames.send(to_frame({"n": n, "ack": self._received, **message}))

    def bye(self) -> str:
        """End the session; the reason that the server gives."""
        self.post(type="bye")
        try:
            while True:
                self.receive()
        except EOFError as end:
            return end.args[0]
        finally:
            self._frames.cut()
