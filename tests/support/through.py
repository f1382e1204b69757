"""A pytest plugin, `-p support.through`: engines that tests open are served, and tests get them by `hw.connect`.

What a remote engine does not have (the loop, the allocator, the cache: tests look there) is that of the real one.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import headway
from headway import testing
from headway.program.engine import Engine
from headway.remote.context import RemoteContext
from headway.remote.engine import RemoteEngine
from headway.server.serving import Serving
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
        self.serving = Serving(ServerSettings(**self._settings))
        self.serving.set_engine(self.engine)
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

    def __init__(self, engine: Engine) -> None:
        self._served = Served(engine, max_queue_requests=1 << 20)
        super().__init__(f"unix:{self._served.path}", None, 60.0)

    def __getattr__(self, name: str) -> Any:
        if name in ("_served", "_connection", "_closed"):
            raise AttributeError(name)
        return getattr(self._served.engine, name)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._served.close()
            self._served.engine.close()


def opened(*args: Any, **options: Any) -> Through:
    return Through(Engine(*args, **options))


def real(self: RemoteContext, name: str) -> Any:
    """What a test looks at in a context's insides, which are the server's."""
    if name not in ("_table", "_pending", "_conversation"):
        raise AttributeError(name)
    self._settle()
    self._connection.request("engine.stats")  # everything before has been handled
    (session,) = self.engine._served.serving.sessions._sessions.values()
    return getattr(session.contexts[self._number], name)


def pytest_configure() -> None:
    RemoteContext.__getattr__ = real  # type: ignore[attr-defined]
    headway.Engine = opened  # type: ignore[attr-defined]
    testing.Engine = opened  # type: ignore[attr-defined]
