"""Numbered messages in both directions: what was sent and not acknowledged is kept, to be sent again after a drop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from headway.base.text import short_repr
from headway.remote.protocol.codec import encode
from headway.remote.protocol.limits import ACK_EVERY


class SessionClosed(Exception):
    """The session ends: a reason for programs, one of `docs/protocol.md`, and a sentence for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class Outbox:
    """The frames of one session that its client has not acknowledged, in the order of their numbers."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._frames: deque[tuple[int, bytes]] = deque()
        self._last = 0
        self.received = 0  # the number of the client's last message
        self._told = 0  # the last number that the client was told
        self._more = asyncio.Event()

    def add(self, message: dict[str, Any]) -> None:
        """Number a message and keep it until it is acknowledged; raises when the client leaves too much unread."""
        self._last += 1
        frame = encode({"n": self._last, "ack": self.received, **message})
        self._frames.append((self._last, frame))
        self._told, self._bytes = self.received, self._bytes + len(frame)
        self._more.set()
        if self._bytes > self._limit:
            raise SessionClosed("unread", f"more than {self._limit} bytes were sent and not acknowledged")

    def receive(self, message: dict[str, Any]) -> None:
        """Check the number of a message of the client, and forget what it acknowledges."""
        number, ack = message.get("n"), message.get("ack")
        if type(number) is not int or number != self.received + 1:
            raise SessionClosed("out_of_order", f"message {self.received + 1} is next, and {short_repr(number)} came")
        self.acknowledge(ack)
        self.received = number

    def acknowledge(self, ack: Any) -> None:
        """The client has all messages up to this number."""
        if type(ack) is not int or not 0 <= ack <= self._last:
            raise SessionClosed(
                "out_of_order", f"{short_repr(ack)} was acknowledged, and {self._last} messages were sent"
            )
        while self._frames and self._frames[0][0] <= ack:
            self._bytes -= len(self._frames.popleft()[1])

    @property
    def owes_ack(self) -> bool:
        """Whether the client has sent much since it was last told what arrived."""
        return self.received - self._told >= ACK_EVERY

    def ack(self) -> bytes:
        """A message that only acknowledges."""
        self._told = self.received
        return encode({"type": "ack", "ack": self.received})

    async def after(self, number: int) -> list[tuple[int, bytes]]:
        """The frames with higher numbers, once there are any."""
        while self._last <= number:
            self._more.clear()
            await self._more.wait()
        return [each for each in self._frames if each[0] > number]
