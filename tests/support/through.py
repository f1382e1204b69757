"""A pytest plugin, `-p support.through`: engines that tests open are served, and tests get them by `hw.connect`.

What a remote engine does not have (the loop, the allocator, the cache: tests look there) is that of the real one.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import headway
from headway import testing
from headway.models.adapters.adapter import Adapter
from headway.program.engine import Engine
from headway.remote import forward
from headway.remote.context import RemoteContext
from headway.remote.engine import RemoteEngine, RemoteTokenizer
from headway.remote.execution import RemoteExecution
from headway.remote.forward import RemoteForward
from headway.server.adapters import ServedAdapter
from headway.server.serving import Serving
from headway.server.sessions import verbs
from headway.server.sessions.sockets import UnixListener
from headway.server.settings import ServerSettings


class Served:
    """An engine on a Unix socket, in a thread of its own."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headway-")
        self.path = Path(self._folder.name) / "socket"
        self.engine, self._settings = engine, {"session_socket": self.path, **settings}
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="served", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def url(self) -> str:
        return f"unix:{self.path}"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.serving = await Serving.of_engine(ServerSettings(**self._settings), self.engine)
        async with UnixListener(self.serving, self.path):
            self._ready.set()
            await self._stop.wait()
            await self.serving.sessions.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._folder.cleanup()


class Through(RemoteEngine):
    """A remote engine that closes its server too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        engine = Engine(*args, **options)
        self._served = Served(engine, max_queue_requests=1 << 20)
        self._lock = ServersLock(self)
        super().__init__(f"unix:{self._served.path}", None, 60.0)
        self.config = engine.config
        ENGINES.add(self)
        if self._tokenizer is not None:
            self._tokenizer._real = engine.tokenizer  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name in ("_served", "_connection", "_closed"):
            raise AttributeError(name)
        if name == "_loop":
            self._connection.request("engine.adapters")  # what was sent before has arrived
        return getattr(self._served.engine, name)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._served.close()
            self._served.engine.close()


ENGINES: weakref.WeakSet[Through] = weakref.WeakSet()


class ServersLock:
    """The engine's lock for a test, held by the server's own thread: it still replies, and no step begins."""

    def __init__(self, engine: Through) -> None:
        self._engine, self._held = weakref.ref(engine), 0

    def __enter__(self) -> None:
        self._held += 1
        if self._held == 1:
            self._on_server("acquire")

    def __exit__(self, *error: object) -> None:
        self._held -= 1
        if not self._held:
            engine = self._engine()
            assert engine is not None
            engine._connection.request("engine.adapters")  # what was sent meanwhile has arrived
            self._on_server("release")

    def _on_server(self, verb: str) -> None:
        engine = self._engine()
        assert engine is not None
        served = engine._served

        async def act() -> None:
            getattr(served.engine._lock, verb)()

        asyncio.run_coroutine_threadsafe(act(), served._loop).result()


def executed(self: RemoteForward) -> RemoteExecution:
    """Raise what the server refuses at once, as a pass in process does; a program is told when it awaits the pass."""
    execution = execute(self)
    self._context._connection.request("engine.adapters")
    if execution._submitted.failed and execution._submitted.reply["error"]["kind"] != "PassFailed":
        execution._submitted.value()
    return execution


execute = RemoteForward.execute


def real(self: RemoteContext, name: str) -> Any:
    """What a test looks at in a context's insides, which are the server's."""
    if name not in ("_table", "_pending", "_conversation", "_written", "_room"):
        raise AttributeError(name)
    self._settle()
    self._connection.request("engine.adapters")  # everything before has been handled
    (session,) = self.engine._served.serving.sessions._sessions.values()  # type: ignore[attr-defined]
    return getattr(session.contexts[self._number], name)


def job(self: RemoteExecution) -> Any:
    """What tests ask of a pass's job: whether it is done."""
    return SimpleNamespace(outcome=self)


def of_tokenizer(self: RemoteTokenizer, name: str) -> Any:
    """What tests compile grammars with."""
    if name == "_real":
        raise AttributeError(name)
    return getattr(self._real, name)  # type: ignore[attr-defined]


def named(given: Any) -> Any:
    """An adapter by its name: every server of this process has it under its hash."""
    adapter, scale = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    if not isinstance(adapter, Adapter):
        return by_name(given)
    for engine in ENGINES:
        with suppress(headway.HeadwayError):  # an adapter of another model
            engine._served.engine._adapters.load(adapter)  # before a test holds the lock
        served = engine._served.serving.default_model.adapters._served
        served[adapter.digest] = ServedAdapter(adapter.digest, adapter, 1.0, 0)
    return by_name((adapter.digest, scale))


by_name = forward.adapter_pair


def pytest_configure() -> None:
    forward.adapter_pair = named
    RemoteTokenizer.__getattr__ = of_tokenizer  # type: ignore[attr-defined]
    RemoteExecution._job = property(job)  # type: ignore[attr-defined]
    RemoteContext.__getattr__ = real  # type: ignore[attr-defined]
    RemoteForward.execute = executed
    verbs.WAITING.clear()  # the thread that holds a lock for a test does all the work
    headway.Engine = Through  # type: ignore[misc]
    testing.Engine = Through  # type: ignore[attr-defined]
