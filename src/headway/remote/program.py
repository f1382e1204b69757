"""What an uploaded program is given: the engine it runs beside, and the session with whoever started it.

The same in a WebAssembly sandbox, where `send` and `recv` are all there is, and in a confined process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from headway.base.checks import check_text
from headway.base.errors import InvalidInput, Unsupported
from headway.remote.connection.mailbox import Mailbox
from headway.remote.engine import RemoteEngine


class ProgramEngine(RemoteEngine):
    """The engine beside which a program runs. `session` has its messages."""

    def __init__(self, url: str = "program:", api_key: str | None = None, timeout: float = 30.0) -> None:
        super().__init__(url, api_key, timeout)
        self.session = ProgramSession(self)

    def __repr__(self) -> str:
        return f"<Engine {self.info.name!r}, for this program>"

    def close(self) -> None:
        """Use it no more; its contexts are released when the program ends."""
        self._closed = True

    def run(self, program: Any, *args: Any) -> NoReturn:
        """Refused: the program runs already."""
        raise Unsupported("this program runs already; await the function instead of engine.run(function)")


class ProgramSession:
    """Messages between a program and whoever started it, and between programs of one key by topic.

    Values are JSON: text, numbers, booleans, None, lists, and dictionaries with text as keys.
    """

    def __init__(self, engine: ProgramEngine) -> None:
        self._engine = engine
        self._received = _Incoming(engine, "program.receive")

    def send(self, value: Any) -> None:
        """Send a value to whoever started the program."""
        self._engine._connection.tell("program.send", value=_json(value))

    async def receive(self) -> Any:
        """The next value that was sent to the program; waits for it."""
        return await self._received.next()

    async def publish(self, topic: str, value: Any) -> int:
        """Send a value to the programs that subscribe to a topic; how many there are. Waits while one is behind."""
        return await self._engine._ask("program.publish", topic=check_text(topic, "the topic"), value=_json(value))

    async def subscribe(self, topic: str) -> Subscription:
        """From now on receive what programs of the same key publish under a topic."""
        await self._engine._ask("program.subscribe", topic=check_text(topic, "the topic"))
        return Subscription(self._engine, topic)

    def _print(self, text: str) -> None:
        self._engine._connection.tell("program.print", text=text)

    def _flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._engine._connection.request("program.flush")


class Subscription:
    """The messages of one topic, in their order: `await next()`, or `async for`."""

    def __init__(self, engine: ProgramEngine, topic: str) -> None:
        self._engine, self.topic = engine, topic
        self._received = _Incoming(engine, "program.next", topic=topic)

    async def next(self) -> Any:
        """The next message; waits for it."""
        return await self._received.next()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            yield await self.next()

    async def close(self) -> None:
        """Receive no more of it."""
        self._received.close()
        await self._engine._ask("program.unsubscribe", topic=self.topic)


class _Incoming:
    """Values that are asked for one by one. One that comes after its waiter has left is for the next."""

    def __init__(self, engine: ProgramEngine, verb: str, **args: Any) -> None:
        self._engine, self._verb, self._args = engine, verb, args
        self._asked: tuple[int, Mailbox] | None = None
        self._turn = asyncio.Lock()

    async def next(self) -> Any:
        connection = self._engine._connection
        async with self._turn:
            if self._asked is None:
                self._asked = connection.ask(self._verb, **self._args)
            reply = await self._asked[1].next()
            self._asked = None
            return connection.value(reply)

    def close(self) -> None:
        if self._asked is not None:
            self._engine._connection.forget(self._asked[0])
            self._engine._connection.tell("session.cancel", request=self._asked[0])


def _json(value: Any) -> Any:
    """A value that can be sent, checked where the program can be told."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"this cannot be sent as JSON: {error}") from None
    return value
