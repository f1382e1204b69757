"""A session: one client's contexts, passes and generations, over as many connections as it takes.

Messages are handled in their order by one task. What takes time (a pass, steps of a generation) goes on in tasks of its
own, and its result is sent when it is there. A session outlives a dropped connection by `session_grace` seconds; when
it ends, everything that it holds is released.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from headway.base.errors import Closed, HeadwayError, InvalidInput, Unsupported
from headway.program.context import Context
from headway.remote.codec import BadMessage
from headway.remote.limits import KEPT_PASSES
from headway.remote.values import error_json, error_of
from headway.server import logs
from headway.server.errors import FAILED, ApiError
from headway.server.keys import Tenant
from headway.server.sessions import generation_verbs  # noqa: F401  # its verbs
from headway.server.sessions.generations import PreparedStep, ServedGeneration
from headway.server.sessions.outbox import Outbox, SessionClosed
from headway.server.sessions.passes import ServedPass
from headway.server.sessions.verbs import VERBS, WAITING

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.server.serving import Serving

RUNNING: ContextVar[int | None] = ContextVar("generation", default=None)  # whose work this task does
LARGE = 64 << 10  # bytes of a message from which on it is read in a thread
INBOX = 64  # messages that wait; then the connection is not read


class ClientError(HeadwayError):
    """What a callable of the client raised; the client has the exception itself."""

    def __init__(self, call: int, message: str) -> None:
        super().__init__(message)
        self.call = call


class Session:
    """One client of this server."""

    def __init__(self, serving: Serving, tenant: Tenant, on_end: Callable[[Session], None]) -> None:
        self.id = secrets.token_urlsafe(24)
        self.serving, self.tenant, self._on_end = serving, tenant, on_end
        self.outbox = Outbox(serving.settings.max_session_bytes)
        self.inbox: asyncio.Queue[tuple[dict[str, Any], int]] = asyncio.Queue(INBOX)
        self.contexts: dict[int, Context | HeadwayError] = {}
        self.passes: dict[Context, OrderedDict[int, ServedPass]] = {}  # the latest of each context
        self.generations: dict[int, ServedGeneration] = {}
        self.prepared: dict[int, PreparedStep] = {}
        self.requests: dict[int, asyncio.Task[None]] = {}  # those that take time
        self.closed: SessionClosed | None = None
        self.ended = asyncio.Event()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._objects = itertools.count(-1, -1)  # objects that this side names: copies
        self._tasks: set[asyncio.Task[Any]] = set()
        self.caller = ClientCaller(self)
        self._is_awaiting = False  # a verb that may wait for the client
        self._worker = asyncio.create_task(self._work())

    @property
    def engine(self) -> Engine:
        return self.serving.engine

    # -- messages --------------------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, now or after the client has come back."""
        try:
            self.outbox.add(message)
        except SessionClosed as closed:
            self.end(closed)

    async def receive(self, message: dict[str, Any], size: int) -> None:
        """A message of the client, numbered; waits while many are not handled yet."""
        self.outbox.receive(message)
        match message:
            case {"type": "return", "id": int(call)} if self._is_awaiting:  # perhaps this
                self._returned(call, message)
            case {"type": "return", "id": int()}:  # after the requests that the callable has sent before it
                await self.inbox.put((message, size))
            case {"type": "bye"}:
                self.end(SessionClosed("bye", "the client has ended the session"))
            case {"type": "request", "id": int(), "verb": str(), "args": dict()}:
                await self.inbox.put((message, size))
            case _:
                raise SessionClosed("malformed", f"a message of type {message.get('type')!r:.40} is not known")

    async def _work(self) -> None:
        """Handle requests in their order."""
        while self.closed is None:
            message, size = await self.inbox.get()
            try:
                await self._handle(message, size)
            except (SessionClosed, BadMessage) as error:
                self.end(error if isinstance(error, SessionClosed) else SessionClosed("malformed", str(error)))

    async def _handle(self, message: dict[str, Any], size: int) -> None:
        if message["type"] == "return":
            return self._returned(message["id"], message)
        id, name, args = message["id"], message["verb"], message["args"]
        verb = VERBS.get(name)
        if verb is None:
            raise SessionClosed("malformed", f"the verb {name!r:.80} is not known")
        try:
            bound = inspect.signature(verb).bind(self, **args)
        except TypeError as error:
            raise SessionClosed("malformed", f"{name}: {error}"[:200]) from None
        quiet = message.get("quiet") is True
        RUNNING.set(args.get("generation"))
        try:
            if inspect.iscoroutinefunction(verb):
                self._is_awaiting = True
                try:
                    value = await verb(*bound.args, **bound.kwargs)
                finally:
                    self._is_awaiting = False
            elif name in WAITING or size > LARGE:
                value = await asyncio.to_thread(verb, *bound.args, **bound.kwargs)
            else:
                value = verb(*bound.args, **bound.kwargs)
        except BadMessage:
            raise
        except Exception as error:
            return None if quiet else self.reply(id, error=error)
        if inspect.isawaitable(value):
            task = self.requests[id] = self.start(self._replied(id, value))
            task.add_done_callback(lambda _: self.requests.pop(id, None))
            return None
        return None if quiet else self.reply(id, value)

    async def _replied(self, id: int, value: Awaitable[Any]) -> None:
        """Reply with what is there later."""
        try:
            found = await value
        except asyncio.CancelledError:
            self.reply(id, error=Closed("this was cancelled"), cancelled=True)
            raise
        except Exception as error:
            return self.reply(id, error=error)
        self.reply(id, found)

    def reply(self, id: int, value: Any = None, *, error: BaseException | None = None, cancelled: bool = False) -> None:
        """The reply to a request."""
        message: dict[str, Any] = {"type": "reply", "id": id}
        if error is None:
            message["value"] = value
        else:
            message["error"] = self.error(error) | ({"cancelled": True} if cancelled else {})
        self.send(message)

    def error(self, error: BaseException) -> dict[str, Any]:
        """An error for the client. One that is not Headway's own is logged, and its text stays here."""
        match error:
            case ClientError():
                return {"kind": "HeadwayError", "message": str(error), "call": error.call}
            case ApiError():
                return {"kind": "HeadwayError", "message": error.message, "code": error.code}
            case HeadwayError():
                return error_json(error)
        logs.failure("a request of a session failed", error, with_text=self.serving.settings.log_prompts)
        return {"kind": "HeadwayError", "message": FAILED}

    # -- work that takes time --------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something concurrently with the messages that follow; the server waits for it before it exits."""
        task = asyncio.create_task(work)

        def cancel(why: ApiError) -> None:
            task.cancel()

        def done(_: object) -> None:
            self._tasks.discard(task)
            self.serving.cancels.discard(cancel)
            if not task.cancelled() and (error := task.exception()) is not None:
                logs.failure("a task of a session failed", error, with_text=self.serving.settings.log_prompts)

        self._tasks.add(task)
        self.serving.cancels.add(cancel)
        task.add_done_callback(done)
        return task

    async def pump(self, number: int, served: ServedGeneration) -> None:
        """Send the steps that the client has pulled."""
        try:
            with self.serving.queue_slot(self.tenant):
                await served.pump()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.send({**served.failed(), "generation": number, "error": self.error(error)})
        finally:
            if served.task is asyncio.current_task():
                served.task = None

    # -- the client's callables ------------------------------------------------------------------------------------

    @property
    def running(self) -> int | None:
        """The generation whose work is done here."""
        return RUNNING.get()

    def call(self, message: dict[str, Any]) -> asyncio.Future[Any]:
        """Call something on the client."""
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._calls.pop(number, None))
        self.send({"type": "call", "id": number, **message})
        return future

    def new_object(self) -> int:
        return next(self._objects)

    def _returned(self, call: int, message: dict[str, Any]) -> None:
        future = self._calls.get(call)
        if future is None or future.done():
            return  # it was cancelled meanwhile
        if "error" in message:
            text = str(error_of(message["error"]))
            future.set_exception(ClientError(call, text))
        else:
            future.set_result(message.get("value"))

    # -- what it holds ---------------------------------------------------------------------------------------------

    def context(self, number: Any) -> Context:
        """A context of this session, for a verb: the client has the results of the passes before it."""
        found = self.contexts.get(number) if isinstance(number, int) else None
        if isinstance(found, HeadwayError):
            raise found
        if found is None:
            raise Closed(f"this session has no context {number!r:.40}; it was released")
        self.settle_passes(found)
        return found

    def settle_passes(self, context: Context) -> None:
        """The client goes on with a context: it has the results of its passes."""
        for served in self.passes.get(context, {}).values():
            served.settle()

    def hold(self, number: Any, context: Context) -> Context:
        """Keep a context under a number that the client has chosen."""
        try:
            self.check_new(number)
        except BaseException:
            context.release()
            raise
        self.contexts[number] = context
        return context

    def check_number(self, number: Any) -> None:
        """Raise unless a new context may be called that."""
        if not isinstance(number, int) or isinstance(number, bool) or number in self.contexts:
            raise BadMessage(f"{number!r:.40} is not a new number of a context")

    def check_new(self, number: Any) -> None:
        """The same, and there may be one more."""
        self.check_number(number)
        most = self.serving.settings.max_contexts
        if len(self.contexts) >= most:
            raise InvalidInput(f"this session has {len(self.contexts)} contexts; max_contexts is {most}: release some")

    def keep_pass(self, number: Any, served: ServedPass) -> None:
        """Remember a pass, so that it can be cancelled and its tokens fed to the next."""
        if not isinstance(number, int):
            raise BadMessage(f"{number!r:.40} is not a number of a pass")
        kept = self.passes.setdefault(served.context, OrderedDict())
        kept[number] = served
        while len(kept) > KEPT_PASSES:
            kept.popitem(last=False)[1].settle()

    def find_pass(self, number: Any) -> ServedPass | None:
        return next((kept[number] for kept in self.passes.values() if number in kept), None)

    def generation(self, number: Any) -> ServedGeneration:
        found = self.generations.get(number) if isinstance(number, int) else None
        if found is None:
            raise Closed(f"this session has no generation {number!r:.40}")
        return found

    def check_bid(self, bid: Any) -> None:
        """Raise if the key may not bid that much."""
        most = self.tenant.limits.max_priority
        if most is not None and isinstance(bid, int | float) and bid > most:
            raise Unsupported(f"the priority is {bid}; this key may have at most {most:g}")

    # -- ending ----------------------------------------------------------------------------------------------------

    def end(self, closed: SessionClosed) -> None:
        """End it: everything it holds is released, and a connection that is open is closed with the reason."""
        if self.closed is None:
            self.closed = closed
            self._on_end(self)
            self.ended.set()
            self._ending = asyncio.get_running_loop().create_task(self._release())  # kept: a task may be collected

    async def _release(self) -> None:
        tasks = [task for task in (*self._tasks, self._worker) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        for kept in self.passes.values():
            for served in kept.values():
                if served.execution is not None and not served.execution.done():
                    served.execution.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        self.generations.clear()
        self.prepared.clear()
        self.passes.clear()
        for context in self.contexts.values():
            if isinstance(context, Context):
                context.release()
        self.contexts.clear()

    async def released(self) -> None:
        """Wait until everything is released."""
        await self._ending


class ClientCaller:
    """The client's objects, called for the generation that is at work: a fork's calls are its own."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def ask(self, of: int, method: str, *args: Any) -> Awaitable[Any]:
        return self._session.call({"generation": RUNNING.get(), "object": of, "method": method, "args": list(args)})

    def tell(self, of: int, method: str, *args: Any) -> None:
        message = {"generation": RUNNING.get(), "object": of, "method": method, "args": list(args)}
        self._session.send({"type": "tell", **message})

    def new_object(self) -> int:
        return self._session.new_object()
