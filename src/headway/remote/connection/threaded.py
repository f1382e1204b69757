"""The client's connection: a thread with an event loop of its own that sends, receives, and comes back after a drop.

Programs hand it messages from any thread, in their order; replies go to the mailbox of whoever asked. Messages are
numbered, and those that the server has not acknowledged are kept: after a drop they are sent again, so that each is
handled once. The user's own functions never run in this thread.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.base.errors import Closed, ConnectionFailed, HeadwayError, InvalidInput, WrongType
from headway.remote.connection.mailbox import Mailbox
from headway.remote.connection.transport import Transport, open_transport
from headway.remote.protocol.codec import VERSION, BadMessage, decode, encode
from headway.remote.protocol.limits import ACK_EVERY
from headway.remote.protocol.values import error_of

PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds between attempts to come back; the last one is repeated


class Lost:
    """In a mailbox: nothing more will come."""

    def __init__(self, error: HeadwayError) -> None:
        self.error = error


class Connection:
    """One session with a server."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout: float,
        route: Callable[[dict[str, Any]], None],
        *,
        model: str | None = None,
    ) -> None:
        self._url, self._key, self._timeout, self._model = url, api_key, timeout, model
        self.welcome: dict[str, Any] = {}
        self._route = route  # takes steps, and what the server asks
        self.lost: HeadwayError | None = None
        self._ids = itertools.count(1)
        self._sending = threading.RLock()
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._later: deque[tuple[str, dict[str, Any]]] = deque()  # by finalizers, which may only append
        self._sent = self._received = self._told = 0
        self._waiting: dict[int, Mailbox] = {}
        self._everyone: list[Mailbox] = []  # mailboxes of generations
        self._raised: dict[int, BaseException] = {}  # what the user's functions raised, by call
        self._closing = False
        self._start()

    def _start(self) -> None:
        """Connect; raises when that fails."""
        self._loop = asyncio.new_event_loop()
        self._more = asyncio.Event()
        first = Mailbox()
        self._thread = threading.Thread(target=self._run, args=(first,), name="headway-connection", daemon=True)
        self._thread.start()
        if isinstance(answer := first.get(), Lost):
            raise answer.error

    def _wake(self) -> None:
        """There is something to send."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._more.set)

    def new_mailbox(self) -> Mailbox:
        """Where somebody waits for what this connection brings."""
        return Mailbox()

    # -- for programs ------------------------------------------------------------------------------------------------

    def request(self, verb: str, **args: Any) -> Any:
        """Ask, and wait for the reply in this thread."""
        return self.value(self.ask(verb, **args)[1].get())

    def ask(self, verb: str, into: Mailbox | None = None, **args: Any) -> tuple[int, Mailbox]:
        """Ask: the request's number, and where the reply comes."""
        number, mailbox = next(self._ids), into or self.new_mailbox()
        self._waiting[number] = mailbox
        try:
            self._post({"type": "request", "id": number, "verb": verb, "args": args})
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return number, mailbox

    def tell(self, verb: str, **args: Any) -> None:
        """Ask for something that cannot fail, or whose failure the next request shows; there is no reply."""
        self._post({"type": "request", "id": next(self._ids), "verb": verb, "args": args, "quiet": True})

    def tell_later(self, verb: str, **args: Any) -> None:
        """The same from a finalizer, which may run anywhere: before the next message."""
        self._later.append((verb, args))
        self._wake()

    def give(self, call: int, value: Any = None, error: BaseException | None = None) -> None:
        """Return from a call of the server."""
        message: dict[str, Any] = {"type": "return", "id": call}
        if error is None:
            try:
                return self._post({**message, "value": value})
            except (TypeError, ValueError) as wrong:
                error = wrong
        self._raised[call] = error
        self._post({**message, "error": {"kind": type(error).__name__, "message": str(error)[:1000]}})

    def value(self, message: Any) -> Any:
        """The value of a reply; raises its error."""
        if isinstance(message, Lost):
            raise type(message.error)(str(message.error))
        if "error" in message:
            raise self.error(message["error"])
        return message.get("value")

    def error(self, given: Any) -> BaseException:
        """The error of a reply; one that a function of the user's own raised is itself."""
        call = given.get("call") if isinstance(given, dict) else None
        own = None if call is None else self._raised.pop(call, None)
        return error_of(given) if own is None else own

    def forget(self, number: int) -> None:
        """Nobody waits for a reply any more."""
        self._waiting.pop(number, None)

    def mailbox(self) -> Mailbox:
        """One that is told when the connection is lost."""
        mailbox = self.new_mailbox()
        self._everyone.append(mailbox)
        if self.lost is not None:
            mailbox.put(Lost(self.lost))
        return mailbox

    def drop_mailbox(self, mailbox: Mailbox) -> None:
        with suppress(ValueError):
            self._everyone.remove(mailbox)

    def close(self) -> None:
        """End the session."""
        if self.lost is None:
            with suppress(HeadwayError):
                self._post({"type": "bye"})
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout)

    def _post(self, message: dict[str, Any]) -> None:
        with self._sending:
            if self.lost is not None:
                raise type(self.lost)(str(self.lost))
            self._flush_later()
            self._number(message)
        self._wake()

    def _flush_later(self) -> None:
        while self._later:
            verb, args = self._later.popleft()
            self._number({"type": "request", "id": next(self._ids), "verb": verb, "args": args, "quiet": True})

    def _number(self, message: dict[str, Any]) -> None:
        try:
            frame = encode({"n": self._sent + 1, "ack": self._received, **message})
        except ValueError:
            raise InvalidInput(
                "a number that was given is infinite or not a number; it must be a finite number"
            ) from None
        except TypeError as error:
            raise WrongType(f"{error}: an argument must be a plain value, a list or an array of numbers") from None
        limit = self.welcome.get("max_message_bytes", len(frame))
        if len(frame) > limit:
            raise InvalidInput(f"this message has {len(frame)} bytes and the server takes at most {limit}; send less")
        self._sent += 1
        self._told = self._received
        self._unacked.append((self._sent, frame))

    # -- in the connection's thread ----------------------------------------------------------------------------------

    def _run(self, first: Mailbox) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(first))
        finally:
            self._loop.close()

    async def _serve(self, first: Mailbox) -> None:
        """Connect, talk, come back, until there is nothing to come back to."""
        error: HeadwayError = Closed("this engine's connection was closed")
        try:
            until, attempts = time.monotonic() + self._timeout, 0
            while not self._closing:
                try:
                    transport = await self._open()
                except ConnectionError as lost:
                    if isinstance(lost, ConnectionFailed) or not self.welcome or time.monotonic() > until:
                        raise lost if isinstance(lost, ConnectionFailed) else ConnectionFailed(str(lost)) from None
                    await asyncio.sleep(PAUSES[min(attempts, len(PAUSES) - 1)])
                    attempts += 1
                    continue
                attempts = 0
                first.put(None)
                await self._talk(transport)
                until = time.monotonic() + self.welcome["grace"]
        except HeadwayError as failed:
            error = failed
        except Exception as failed:
            error = ConnectionFailed(f"the connection failed: {type(failed).__name__}: {failed}")
        self._lose(error)
        first.put(Lost(error))

    def _lose(self, error: HeadwayError) -> None:
        with self._sending:
            self.lost = error
        waiting = [*self._waiting.values(), *self._everyone]
        self._waiting.clear()
        for mailbox in waiting:
            mailbox.put(Lost(error))

    async def _open(self) -> Transport:
        """A connection with a session, new or resumed."""
        transport = await open_transport(self._url, self._key, self._timeout)
        try:
            await transport.send(encode(self._hello()))
            async with asyncio.timeout(self._timeout):
                self._welcomed(decode(await transport.receive()))
        except TimeoutError:
            raise ConnectionError("the server said nothing") from None
        except ConnectionFailed:
            await transport.close()
            raise
        return transport

    def _hello(self) -> dict[str, Any]:
        hello: dict[str, Any] = {"type": "hello", "version": VERSION}
        if self._key is not None:
            hello["key"] = self._key
        if self._model is not None:
            hello["model"] = self._model
        if self.welcome:
            hello["resume"] = {"session": self.welcome["session"], "received": self._received}
        return hello

    def _welcomed(self, welcome: dict[str, Any]) -> None:
        """The server's first message."""
        if welcome.get("type") == "close":
            raise ConnectionFailed(f"the server closed the connection ({welcome['reason']}): {welcome['message']}")
        if welcome.get("type") != "welcome" or welcome.get("version") != VERSION:
            raise ConnectionFailed(f"the server answered {str(welcome)[:80]}; this client speaks version {VERSION}")
        self.welcome = welcome

    async def _talk(self, transport: Transport) -> None:
        """Send and receive until the connection is gone."""
        tasks = [
            asyncio.create_task(self._read(transport)),
            asyncio.create_task(self._write(transport, self.welcome["received"])),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                dropped = isinstance(error, ConnectionError) and not isinstance(error, ConnectionFailed)
                if error is not None and not dropped:
                    raise error  # there is nothing to come back to
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(Exception):
                await transport.close()

    async def _write(self, transport: Transport, last: int) -> None:
        while True:
            self._more.clear()
            with self._sending:
                self._flush_later()
                frames = [each for each in self._unacked if each[0] > last]
            for number, frame in frames:
                await transport.send(frame)
                last = number
            if self._closing and not self._unacked_after(last):
                return
            if not frames:
                await self._more.wait()

    def _unacked_after(self, last: int) -> bool:
        return bool(self._unacked) and self._unacked[-1][0] > last

    async def _read(self, transport: Transport) -> None:
        while True:
            if self._take(decode(await transport.receive())):
                await transport.send(self._ack())

    def _take(self, message: dict[str, Any]) -> bool:
        """A message of the server; whether it is time to acknowledge."""
        if "ack" in message:
            self._acknowledged(message["ack"])
        kind = message.get("type")
        if kind == "ack":
            return False
        if kind == "close":
            raise ConnectionFailed(f"the server closed the session ({message['reason']}): {message['message']}")
        if message.get("n") != self._received + 1:
            raise BadMessage(f"message {self._received + 1} is next, and {message.get('n')!r:.40} came")
        self._received = message["n"]
        self._deliver(message)
        return self._received - self._told >= ACK_EVERY

    def _ack(self) -> bytes:
        self._told = self._received
        return encode({"type": "ack", "ack": self._received})

    def _acknowledged(self, ack: int) -> None:
        with self._sending:
            while self._unacked and self._unacked[0][0] <= ack:
                self._unacked.popleft()

    def _deliver(self, message: dict[str, Any]) -> None:
        if message.get("type") == "reply":
            mailbox = self._waiting.pop(message["id"], None)
            if mailbox is not None:
                mailbox.put(message)
        else:
            self._route(message)
