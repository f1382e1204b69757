"""The sessions of a server: who may open one, who may come back to one, and what each key has saved."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.remote.protocol.codec import VERSION, BadMessage, encode
from headway.server import logs
from headway.server.errors import ApiError
from headway.server.keys import ANYONE, Tenant
from headway.server.sessions.outbox import SessionClosed
from headway.server.sessions.session import SHOWN_ID, Session

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.server.programs.run import Run
    from headway.server.serving import Serving

REASON_BYTES = 123  # of a WebSocket's close frame


class Link(Protocol):
    """One connection, over a WebSocket or a Unix socket."""

    async def receive(self) -> tuple[dict[str, Any], int]:
        """The next message and its size; raises `BadMessage`, or `ConnectionError` when it is gone."""
        ...

    async def send(self, frame: bytes) -> None: ...

    async def close(self, reason: str, message: str) -> None: ...


class ClientConnection:
    """A link of a session, until the client comes back on another one."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.replaced, self.unused = asyncio.Event(), asyncio.Event()  # the session reads nothing of it any more


class Sessions:
    """All sessions of one server. Used on the event loop, except for snapshots, which are counted in any thread."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._sessions: dict[str, Session] = {}
        self._connections: dict[Session, ClientConnection] = {}
        self._timers: dict[Session, asyncio.TimerHandle] = {}
        self._snapshots: dict[str, set[str]] = {}

    async def serve(self, link: Link, tenant: Tenant | None, program: Run | None = None) -> SessionClosed | None:
        """Talk to a client until its connection ends; why the session was closed, if it was.

        `tenant` is that of the connection's own key, if it had one. The session of a program that runs here ends with
        the connection.
        """
        session, connection = None, ClientConnection(link)
        try:
            try:
                limit = self._serving.settings.header_timeout
                async with asyncio.timeout(limit if program is None else None):  # a program has limits of its own
                    hello, _ = await link.receive()
            except TimeoutError:
                raise SessionClosed("hello", "no hello came in time") from None
            session = await self._admit(hello, tenant, program)
            await self._replace(session, connection)
            await self._talk(session, connection, _received(hello))
        except SessionClosed as closed:
            await self._close(session, link, closed)
            return closed
        except BadMessage as error:
            closed = SessionClosed("malformed", str(error))
            await self._close(session, link, closed)
            return closed
        except ConnectionError:
            pass
        finally:
            connection.unused.set()
            if session is not None and self._connections.get(session) is connection:
                await self._lost(session)
        return None if session is None else session.closed

    async def refuse(self, link: Link, message: str) -> None:
        """Close a connection without a session: there are too many."""
        await self._close(None, link, SessionClosed("busy", message))

    async def _close(self, session: Session | None, link: Link, closed: SessionClosed) -> None:
        """Close a connection with a reason; what its client did wrong ends its session, and nothing else."""
        if session is not None and closed.reason != "replaced":
            session.end(closed)
        logs.info("session closed", reason=closed.reason, **_named(session))
        try:
            await link.send(encode({"type": "close", "reason": closed.reason, "message": closed.message}))
            await link.close(closed.reason, closed.message)
        except ConnectionError:
            return

    # -- who may -----------------------------------------------------------------------------------------------------

    async def _admit(self, hello: dict[str, Any], tenant: Tenant | None, program: Run | None) -> Session:
        if hello.get("type") != "hello":
            raise SessionClosed("hello", f"the first message must be hello, not {short_repr(hello.get('type'))}")
        if hello.get("version") != VERSION:
            raise SessionClosed(
                "version",
                f"this server speaks version {VERSION} of the protocol, not {short_repr(hello.get('version'))}",
            )
        if program is None or tenant is None:
            tenant = self._tenant(hello.get("key"), tenant)
            if (resume := hello.get("resume")) is not None:
                return self._resumed(resume, tenant)
        elif hello.get("resume") is not None:
            raise SessionClosed("malformed", "the session of a program ends with its connection; leave resume out")
        self._check_count()
        model = hello.get("model") if program is None or program.model is None else program.model
        if not isinstance(model, str | None):
            raise SessionClosed("malformed", "model must be the name of a model")
        try:
            self._serving.check_rate(tenant)
            lease = await self._serving.models.lease(model, tenant, is_session=True)
        except ApiError as error:
            raise SessionClosed("model" if error.status in (400, 404) else "busy", error.message) from None
        try:
            self._check_count()  # others may have come while the model loaded
            if self._serving.draining:
                raise SessionClosed("draining", "the server is shutting down")
            if lease.adapter is not None:
                base = lease.model.name
                raise SessionClosed("model", f"{lease.name!r} is an adapter; connect to {base!r} and pass adapter=")
        except BaseException:
            lease.release()
            raise
        session = Session(self._serving, tenant, lease, self._ended, program)
        self._sessions[session.id] = session
        logs.info("session opened", **_named(session))
        return session

    def _check_count(self) -> None:
        if len(self._sessions) >= self._serving.settings.max_sessions:
            raise SessionClosed("busy", f"this server has {len(self._sessions)} sessions; try again later")

    def _tenant(self, key: Any, tenant: Tenant | None) -> Tenant:
        """The tenant of the connection's header, or of the key in the first message."""
        keys = self._serving.keys
        if keys is None:
            return ANYONE
        owner = tenant if key is None else keys.find(key) if isinstance(key, str) else None
        if owner is None:
            text = "this API key is not valid" if key is not None else "this server requires an API key"
            raise SessionClosed("key", text)
        return owner

    def _resumed(self, given: Any, tenant: Tenant) -> Session:
        match given:
            case {"session": str(id), "received": int()}:
                pass
            case _:
                raise SessionClosed("malformed", "resume must name a session and the last message received")
        for session in self._sessions.values():
            if hmac.compare_digest(session.id.encode(), id.encode()) and session.tenant.name == tenant.name:
                return session
        raise SessionClosed("unknown_session", "there is no such session; it ended, or its grace time has passed")

    # -- one connection ----------------------------------------------------------------------------------------------

    async def _replace(self, session: Session, connection: ClientConnection) -> None:
        """Use this connection. One that the client has given up is read no more, and then closed."""
        before, self._connections[session] = self._connections.get(session), connection
        if (timer := self._timers.pop(session, None)) is not None:
            timer.cancel()
        if before is not None:
            before.replaced.set()
            await before.unused.wait()

    async def _talk(self, session: Session, connection: ClientConnection, received: int) -> None:
        link = connection.link
        session.outbox.acknowledge(received)
        await link.send(encode(self._welcome(session)))
        tasks = [
            asyncio.create_task(self._read(session, link)),
            asyncio.create_task(_write(session, link, received)),
            asyncio.create_task(session.ended.wait()),
            asyncio.create_task(connection.replaced.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if session.closed is not None:
                raise session.closed
            if connection.replaced.is_set():
                raise SessionClosed("replaced", "the client came back on another connection")
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            connection.unused.set()

    async def _read(self, session: Session, link: Link) -> None:
        while True:
            message, size = await link.receive()
            if message.get("type") == "ack":
                session.outbox.acknowledge(message.get("ack"))
                continue
            await session.receive(message, size)
            if session.outbox.owes_ack:
                await link.send(session.outbox.ack())

    def _welcome(self, session: Session) -> dict[str, Any]:
        settings = self._serving.settings
        return {
            "type": "welcome",
            "version": VERSION,
            "session": session.id,
            "received": session.outbox.received,
            "grace": settings.session_grace,
            "max_message_bytes": settings.max_body_bytes,
            "engine": describe(session.engine, session.lease.name),
        }

    async def _lost(self, session: Session) -> None:
        """A connection is gone: its client may come back within the grace time; a program is over."""
        del self._connections[session]
        if session.program is not None:
            await session.finish()
        elif session.closed is None:
            closed = SessionClosed("lost", "the connection was lost and the client did not come back")
            loop = asyncio.get_running_loop()
            self._timers[session] = loop.call_later(self._serving.settings.session_grace, session.end, closed)

    def _ended(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        if (timer := self._timers.pop(session, None)) is not None:
            timer.cancel()

    async def close(self) -> None:
        """End every session: the server exits."""
        for session in list(self._sessions.values()):
            session.end(SessionClosed("draining", "the server is shutting down"))
            await session.released()

    # -- snapshots ---------------------------------------------------------------------------------------------------

    @contextmanager
    def snapshot(self, tenant: Tenant, name: Any) -> Iterator[None]:
        """Count a snapshot of a key while it is saved; raises when there would be too many."""
        own = self._snapshots.setdefault(tenant.name, set())
        most = self._serving.settings.max_snapshots
        if name not in own and len(own) >= most:
            raise InvalidInput(f"this key has {len(own)} snapshots and max_snapshots is {most}; delete one")
        yield
        own.add(name)

    def forget_snapshot(self, tenant: Tenant, name: Any) -> None:
        """A snapshot is no longer saved."""
        if isinstance(name, str):
            self._snapshots.get(tenant.name, set()).discard(name)


async def _write(session: Session, link: Link, last: int) -> None:
    """Send what the client does not have, in order."""
    while True:
        for number, frame in await session.outbox.after(last):
            await link.send(frame)
            last = number


def _received(hello: dict[str, Any]) -> int:
    resume = hello.get("resume")
    return 0 if resume is None else resume["received"]


def _named(session: Session | None) -> dict[str, str]:
    return {} if session is None else {"tenant": session.tenant.name, "session": session.id[:SHOWN_ID]}


def describe(engine: Engine, name: str) -> dict[str, Any]:
    """What a client knows of an engine from the beginning."""
    config = engine.config
    sizes = ("family", "vocab_size", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "max_positions")
    tokenizer = engine.tokenizer if engine.has_tokenizer else None
    return {
        "name": name,
        "config": {**{size: getattr(config, size) for size in sizes}, "attention_layers": [*config.attention_layers]},
        "info": {**asdict(engine.info), "name": name, "path": None},
        "capabilities": asdict(engine.capabilities),
        "page_size": engine.page_size,
        "pages": engine.pages,
        "deterministic": engine.deterministic,
        "eos_ids": list(engine.eos_ids),
        "tokenizer": None
        if tokenizer is None
        else {"vocab_size": tokenizer.vocab_size, "bos_id": tokenizer.bos_id, "add_bos": tokenizer.add_bos},
    }
