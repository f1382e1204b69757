"""Requests during which the server may call functions of the program: they run in the thread that waits.

A generation or a chat has a number, and the server's calls name it. Whoever waits for it runs them: in an event loop,
or in a plain thread, where only what cannot be async is run.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from headway.base.errors import HeadwayError
from headway.program.generation.steps import not_an_end
from headway.remote.connection.mailbox import Mailbox
from headway.remote.connection.threaded import Lost

if TYPE_CHECKING:
    from headway.remote.engine import RemoteEngine

AWAITED = ("draft", "logits", "prepare", "tool")  # calls of functions that may be async


class Asking:
    """The requests of one generation or chat. `owner` is what the program's functions are called for."""

    def __init__(self, engine: RemoteEngine, number: int, kind: str) -> None:
        self._engine, self._number, self._kind = engine, number, kind

    def now(self, owner: Any, verb: str, **args: Any) -> Any:
        """Ask, and wait in this thread."""
        engine, later, mailbox, request = self._engine, [], self._engine._connection.new_mailbox(), 0
        engine._begin_waiting(self._number, mailbox)  # first: the server may ask something before it replies
        try:
            request = self._send(mailbox, verb, args)
            while True:
                message = mailbox.get()
                if isinstance(message, Lost) or message["type"] == "reply":
                    return engine._connection.value(message)
                if message["method"] in AWAITED:  # of another sequence: for whoever can await it
                    later.append(message)
                else:
                    self._serve_now(owner, message)
        finally:
            self._done(mailbox, request)
            for message in later:
                engine._route(message)

    async def wait(self, owner: Any, verb: str, **args: Any) -> Any:
        """The same in an event loop; cancelling it undoes what is not done."""
        mailbox, request = self._engine._connection.new_mailbox(), 0
        self._engine._begin_waiting(self._number, mailbox)
        try:
            request = self._send(mailbox, verb, args)
            while True:
                message = await mailbox.next()
                if isinstance(message, Lost) or message["type"] == "reply":
                    return self._engine._connection.value(message)
                await self.serve(owner, message)
        except asyncio.CancelledError:
            with suppress(HeadwayError):
                self._engine._connection.tell("session.cancel", request=request)
            raise
        finally:
            self._done(mailbox, request)

    def _send(self, mailbox: Mailbox, verb: str, args: dict[str, Any]) -> int:
        number = {self._kind: self._number}
        return self._engine._connection.ask(f"{self._kind}.{verb}", mailbox, **number, **args)[0]

    def _done(self, mailbox: Mailbox, request: int) -> None:
        self._engine._connection.forget(request)
        self._engine._end_waiting(self._number, mailbox)

    async def serve(self, owner: Any, message: dict[str, Any]) -> None:
        """Do what the server asks of the program."""
        call = message.get("id")
        try:
            value = self._engine._callables.call(message, owner)
            if isawaitable(value):
                value = await value
        except Exception as error:
            return self._give(call, error=error)
        return self._give(call, value)

    def _serve_now(self, owner: Any, message: dict[str, Any]) -> None:
        call = message.get("id")
        try:
            value = self._engine._callables.call(message, owner)
        except Exception as error:
            return self._give(call, error=error)
        return self._give(call, value)

    def _give(self, call: int | None, value: Any = None, error: BaseException | None = None) -> None:
        if isinstance(error, StopAsyncIteration):
            error = not_an_end()
        if call is not None:
            self._engine._connection.give(call, value, error)
