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
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from headway.base.errors import Closed, HeadwayError, InvalidInput, Unsupported
from headway.base.text import short_repr
from headway.program.chat.reply import ChatReply
from headway.program.context import Context
from headway.remote.protocol.codec import BadMessage
from headway.remote.protocol.limits import KEPT_PASSES
from headway.remote.protocol.values import error_json, error_of
from headway.server import logs
from headway.server.adapters import ServedAdapter
from headway.server.errors import FAILED, ApiError
from headway.server.keys import Tenant
from headway.server.sessions import chats, generation_verbs, program_verbs  # noqa: F401  # their verbs
from headway.server.sessions.generations import PreparedStep, ServedGeneration
from headway.server.sessions.outbox import Outbox, SessionClosed
from headway.server.sessions.passes import ServedPass
from headway.server.sessions.verbs import VERBS, WAITING, InSlot
from headway.server.settings import owned_by

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.server.models import ModelLease
    from headway.server.programs.run import Run
    from headway.server.serving import Serving

RUNNING: ContextVar[int | None] = ContextVar("generation", default=None)  # whose work this task does
LARGE = 64 << 10  # bytes of a message from which on it is read in a thread
NUMBERS = {"context", "fork", "other", "generation", "chat", "number", "prepared", "request"}  # they name things
NUMBERS |= {"taken", "upto", "epoch"}  # of steps
SHOWN_ID = 6  # letters of a session's id that logs and traces have: who knows all of it can resume it
MOST_REQUESTS = 4096  # that take time, at once
INBOX = 64  # messages that wait; then the connection is not read


class ClientError(HeadwayError):
    """What a callable of the client raised; the client has the exception itself."""

    def __init__(self, message: str, call: int = 0) -> None:
        super().__init__(message)
        self.call = call


class Session:
    """One client of this server."""

    def __init__(
        self,
        serving: Serving,
        tenant: Tenant,
        lease: ModelLease,
        on_end: Callable[[Session], None],
        program: Run | None = None,
    ) -> None:
        self.id = owned_by(serving.settings.replica, secrets.token_urlsafe(24))
        self.serving, self.tenant, self._on_end = serving, tenant, on_end
        self.lease = lease  # held until everything of the session is released
        self.program = program  # which runs beside the engine, and ends with its only connection
        self.outbox = Outbox(serving.settings.max_session_bytes)
        self.inbox: asyncio.Queue[tuple[dict[str, Any], int]] = asyncio.Queue()
        self._has_room = asyncio.Event()  # whether fewer than INBOX messages wait
        self._has_room.set()
        self.contexts: dict[int, Context | HeadwayError] = {}
        self.passes: dict[Context, OrderedDict[int, ServedPass]] = {}  # the latest of each context
        self.generations: dict[int, ServedGeneration] = {}
        self.prepared: dict[int, PreparedStep] = {}
        self.chats: dict[int, ChatReply] = {}
        self.requests: dict[int, asyncio.Task[None]] = {}  # those that take time
        self.closed: SessionClosed | None = None
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._objects = itertools.count(-1, -1)  # objects that this side names: copies
        self._tasks: set[asyncio.Task[Any]] = set()
        self.caller = ClientCaller(self)
        self._is_awaiting = False  # a verb that may wait for the client
        traces = serving.traces
        self._trace = None if traces is None else traces.session(lease.name, self.id[:SHOWN_ID])
        self._worker = asyncio.create_task(self._work())

    @property
    def engine(self) -> Engine:
        return self.lease.engine

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        """The adapters of its model."""
        return self.lease.model.adapters.names

    # -- messages --------------------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, now or after the client has come back."""
        try:
            self.outbox.add(message)
        except SessionClosed as closed:
            self.end(closed)

    async def receive(self, message: dict[str, Any], size: int) -> None:
        """Take a message of the client, numbered; waits while many are not handled yet.

        A message that is counted is in the inbox: what waits here may be cancelled when its connection is lost.
        """
        self.outbox.receive(message)
        match message:
            case {"type": "return", "id": int(call)} if self._is_awaiting:  # perhaps this
                self._returned(call, message)
            case {"type": "return", "id": int()}:  # after the requests that the callable has sent before it
                self.inbox.put_nowait((message, size))
            case {"type": "bye"}:
                self.end(SessionClosed("bye", "the client has ended the session"))
            case {"type": "request", "id": int(), "verb": str(), "args": dict()}:
                self.inbox.put_nowait((message, size))
            case _:
                raise SessionClosed("malformed", f"a message of type {short_repr(message.get('type'))} is not known")
        if self.inbox.qsize() >= INBOX:
            self._has_room.clear()
            await self._has_room.wait()

    async def _work(self) -> None:
        """Handle requests in their order."""
        while self.closed is None:
            message, size = await self.inbox.get()
            self._has_room.set()
            try:
                await self._handle(message, size)
            except (SessionClosed, BadMessage) as error:
                self.end(error if isinstance(error, SessionClosed) else SessionClosed("malformed", str(error)))
            finally:
                self.inbox.task_done()

    async def _handle(self, message: dict[str, Any], size: int) -> None:
        if message["type"] == "return":
            return self._returned(message["id"], message)
        id, name, args = message["id"], message["verb"], message["args"]
        verb = VERBS.get(name)
        if verb is None:
            raise SessionClosed("malformed", f"the verb {short_repr(name)} is not known")
        try:
            bound = inspect.signature(verb).bind(self, **args)
        except TypeError as error:
            raise SessionClosed("malformed", f"{name}: {error}"[:200]) from None
        for argument in NUMBERS & args.keys():
            if type(args[argument]) is not int:
                raise SessionClosed("malformed", f"{name}: {argument} is {short_repr(args[argument])}, not a number")
        if self._trace is not None:
            self._trace.asked(name)
        quiet = message.get("quiet") is True
        RUNNING.set(args.get("generation", args.get("chat")))
        try:
            if len(self.requests) >= MOST_REQUESTS and "Awaitable" in verb.__annotations__["return"]:
                many = f"{len(self.requests)} requests of this session wait for their replies"
                raise InvalidInput(f"{many}, and no more may; await some of them first")
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
            return self._reply_later(id, value, quiet)
        return None if quiet else self.reply(id, value)

    def _reply_later(self, id: int, value: Awaitable[Any], quiet: bool) -> None:
        """Reply with what is there later, also to a request that is cancelled before its work has begun."""

        async def replied() -> None:
            try:
                result = await value
            except Exception as error:
                return None if quiet else self.reply(id, error=error)
            return None if quiet else self.reply(id, result)

        def done(task: asyncio.Task[None]) -> None:
            self.requests.pop(id, None)
            if task.cancelled():
                if isinstance(value, Coroutine | InSlot):
                    value.close()
                if not quiet:
                    self.reply(id, error=Closed("this was cancelled"), cancelled=True)

        task = self.requests[id] = self.start(replied())
        task.add_done_callback(done)

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

    def drop_object(self, of: int) -> None:
        """Have the client drop a copy that nobody here has any more; called by finalizers, anywhere."""
        if self.closed is None:
            message = {"type": "tell", "generation": None, "object": of, "method": "drop", "args": []}
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.send, message)

    def _returned(self, call: int, message: dict[str, Any]) -> None:
        future = self._calls.get(call)
        if future is None or future.done():
            return  # it was cancelled meanwhile
        if "error" in message:
            text = str(error_of(message["error"]))
            future.set_exception(ClientError(text, call))
        else:
            future.set_result(message.get("value"))

    # -- what it holds ---------------------------------------------------------------------------------------------

    def context(self, number: Any) -> Context:
        """A context of this session."""
        context = self.contexts.get(number) if isinstance(number, int) else None
        if isinstance(context, HeadwayError):
            raise context
        if context is None:
            raise Closed(f"this session has no context {short_repr(number)}; it was released")
        return context

    def settle_passes(self, context: Context) -> None:
        """More is computed over a context: its passes can no longer be undone."""
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
            raise BadMessage(f"{short_repr(number)} is not a new number of a context")

    def check_new(self, number: Any) -> None:
        """The same, and there may be one more."""
        self.check_number(number)
        most = self.serving.settings.max_contexts
        if len(self.contexts) >= most:
            raise InvalidInput(f"this session has {len(self.contexts)} contexts; max_contexts is {most}: release some")

    def keep_pass(self, number: Any, served: ServedPass) -> None:
        """Remember a pass, so that it can be cancelled and its tokens fed to the next."""
        if not isinstance(number, int):
            raise BadMessage(f"{short_repr(number)} is not a number of a pass")
        kept = self.passes.setdefault(served.context, OrderedDict())
        kept[number] = served
        while len(kept) > KEPT_PASSES:
            kept.popitem(last=False)[1].settle()

    def find_pass(self, number: Any) -> ServedPass | None:
        return next((kept[number] for kept in self.passes.values() if number in kept), None)

    def generation(self, number: Any) -> ServedGeneration:
        generation = self.generations.get(number) if isinstance(number, int) else None
        if generation is None:
            raise Closed(f"this session has no generation {short_repr(number)}")
        return generation

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
            if self._trace is not None:
                self._trace.end(closed.reason)
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
        self.chats.clear()
        self.passes.clear()
        for context in self.contexts.values():
            if isinstance(context, Context):
                context.release()
        self.contexts.clear()
        self.lease.release()

    async def finish(self) -> None:
        """A program has ended: handle what it sent before, then release everything."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.serving.settings.write_timeout):
                handled, ended = asyncio.create_task(self.inbox.join()), asyncio.create_task(self.ended.wait())
                try:
                    await asyncio.wait({handled, ended}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    handled.cancel()
                    ended.cancel()
        self.end(SessionClosed("bye", "the program has ended"))
        await self.released()

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

    def named(self, of: int, proxy: Any) -> Any:
        weakref.finalize(proxy, self._session.drop_object, of)
        return proxy

    def new_object(self) -> int:
        return self._session.new_object()

    @contextmanager
    def lent(self, context: Context) -> Iterator[int]:
        number = self._session.new_object()
        self._session.contexts[number] = context
        try:
            yield number
        finally:
            self._session.contexts.pop(number, None)
