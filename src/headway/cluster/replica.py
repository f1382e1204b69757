"""One replica: an engine behind the same HTTP app as `headway serve`, as a deployment of Ray Serve.

Ray starts it, asks for its health, restarts it and replaces it. It listens on a port of its own, where only fronts that
know its secret are served. Requests and responses are bytes over HTTP; through Ray go leases, health and summaries.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.base.dataclass import dataclass
from headway.base.errors import Closed, HeadwayError, InvalidInput
from headway.base.version import VERSION
from headway.cluster.routing import CacheSummary, short_key
from headway.program.figures import page_keys
from headway.server import logs
from headway.server.app import create_app
from headway.server.pooling import PoolingModels
from headway.server.run import QuietServer, configure
from headway.server.serving import Serving
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter

SECRET = b"x-headway-front"  # the header that a front shows a replica its secret in
POLL_SECONDS = 0.05
STOP_SECONDS = 10.0
FAILED = "headway replica: "  # what a sentence for the user begins with, in a message of Ray


@dataclass(frozen=True)
class ReplicaPlan:
    """What every replica needs to start. Callables are functions of this package, with their arguments."""

    model: str
    settings: ServerSettings
    open_engine: Callable[[], Engine]
    open_pooling: Callable[[], PoolingModels]
    open_drafter: Callable[[], Drafter] | None = None
    routers: Callable[[], Sequence[APIRouter]] = tuple
    keys: str | None = None  # the contents of the key file
    version: str = VERSION


class Replica:
    """An engine and its HTTP server, in a process of Ray Serve."""

    def __init__(self, plan: ReplicaPlan) -> None:
        from ray import serve
        from ray.util import get_node_ip_address

        self._name = serve.get_replica_context().replica_id.unique_id
        self._leases: Counter[str] = Counter()  # by front
        self._secret, self._plan, self._host = secrets.token_hex(32), plan, get_node_ip_address()
        try:
            self._start()
        except HeadwayError as error:
            raise RuntimeError(f"{FAILED}on the node {socket.gethostname()}: {error}\n") from None

    def _start(self) -> None:
        plan = self._plan
        if plan.version != VERSION:
            raise InvalidInput(
                f"this node has Headway {VERSION}, and the command was given with {plan.version}; install the same "
                "version on every node"
            )
        logs.set_up(as_json=plan.settings.log_json)
        with key_file(plan.keys) as keys:
            settings = self._settings(plan, keys)
            app = create_app(
                settings,
                plan.open_engine,
                routers=plan.routers(),
                pooling_models=plan.open_pooling(),
                open_drafter=plan.open_drafter,
            )
        self._serving: Serving = app.state.serving
        listener = socket.create_server((self._host, 0), backlog=socket.SOMAXCONN)
        self._url = f"http://{self._host}:{listener.getsockname()[1]}"
        config = configure(settings, app)
        config.app = FrontOnly(app, self._secret)
        self._server = QuietServer(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[listener])), name="headway-replica", daemon=True
        )
        self._thread.start()
        while self._serving.state == "loading" and self._thread.is_alive():
            time.sleep(POLL_SECONDS)
        failure = self._serving.failure
        if failure is not None or not self._thread.is_alive():
            self._server.should_exit = True
            raise failure if isinstance(failure, HeadwayError) else Closed(f"the replica could not start: {failure!r}")
        self._page_size = self._serving.engine.page_size

    def _settings(self, plan: ReplicaPlan, keys: Path | None) -> ServerSettings:
        return replace(
            plan.settings,
            host=self._host,
            port=0,
            allowed_hosts=("*",),  # the front has checked the Host
            key_file=keys,
            unix_socket=None,
            ssl_certfile=None,
            ssl_keyfile=None,
            root_path="",
            log_requests=False,
            replica=self._name,
        )

    # -- what Ray Serve asks for ---------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise when the engine is dead or stuck: Ray then replaces the replica."""
        state = self._serving.state
        if state in ("dead", "failed", "stuck") or not self._thread.is_alive():
            raise RuntimeError(f"{FAILED}the engine of {self._name} is {state}\n")

    def record_routing_stats(self) -> dict[str, Any]:
        """A summary of the prefix cache, for routers."""
        engine = self._serving.engine
        return {
            "cache": CacheSummary.of(map(short_key, page_keys(engine))).packed(),
            "leases": dict(self._leases),
        }

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            self._serving.draining = server.should_exit = True
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    # -- what fronts ask for -------------------------------------------------------------------------------------------

    async def lease(self, number: int, front: str) -> AsyncIterator[dict[str, Any]]:
        """A place on this replica, until the caller cancels; `number` is for its router."""
        self._leases[front] += 1
        try:
            yield self._lease
            await asyncio.get_running_loop().create_future()
        finally:
            self._leases[front] -= 1
            if not self._leases[front]:
                del self._leases[front]

    @property
    def _lease(self) -> dict[str, Any]:
        return {
            "replica": self._name,
            "url": self._url,
            "secret": self._secret,
            "model": self._plan.model,
            "page_size": self._page_size,
        }

    async def about(self) -> dict[str, Any]:
        """What an operator wants to know of it."""
        serving = self._serving
        figures = serving.engine.stats()
        return {
            "replica": self._name,
            "node": socket.gethostname(),
            "pid": os.getpid(),
            "model": self._plan.model,
            "state": serving.state,
            "requests": serving.in_flight,
            "pages_total": figures.pages_total,
            "pages_cached": figures.pages_cached,
        }

    async def metrics(self) -> tuple[str, bytes]:
        """Its name and its Prometheus metrics."""
        return self._name, self._serving.metrics.text()


@contextmanager
def key_file(keys: str | None) -> Iterator[Path | None]:
    """A file of API keys that only this user can read, for as long as the server reads it."""
    if keys is None:
        yield None
        return
    with tempfile.NamedTemporaryFile("w", prefix="headway-keys-") as file:  # mode 0600
        file.write(keys)
        file.flush()
        yield Path(file.name)


class FrontOnly:
    """Lets only those in that show the secret."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._secret = app, secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            shown = next((value for name, value in scope["headers"] if name == SECRET), b"")
            if not hmac.compare_digest(shown, self._secret):
                return await _forbidden(scope, send)
        await self._app(scope, receive, send)


async def _forbidden(scope: Scope, send: Send) -> None:
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    await send({"type": f"{kind}.start", "status": 403, "headers": [(b"content-length", b"0")]})
    await send({"type": f"{kind}.body", "body": b""})
