"""A server in this process: listen, load, serve, drain, end. What `headway serve` does.

first SIGTERM or ctrl-C    health turns red, new requests get 503, those under way finish or time out; exit code 0
a second one               those under way are ended now; exit code 128 + the signal's number
the engine's worker dies   health turns red; what is under way fails; exit code 1
… or hangs                 health turns red; nobody waits for it when the server ends; exit code 1
the model cannot load      its error is raised
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from fastapi import APIRouter, FastAPI

from headway.base.errors import InvalidInput
from headway.server import access_log as logs
from headway.server.app import create_app
from headway.server.errors import ApiError
from headway.server.middleware.connection import protocol
from headway.server.pooling import Pools
from headway.server.serving import Serving
from headway.server.settings import EVERYWHERE, Settings

if TYPE_CHECKING:
    from headway.program.engine import Engine

LAST_LOOK = 1.5  # seconds for others to see that the engine is dead, and for answers to get out
LOOK = 0.05
END_SECONDS = 2  # for requests that were ended to end
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    settings: Settings,
    open_engine: Callable[[], Engine],
    routers: Sequence[APIRouter] = (),
    on_listening: Callable[[str], None] = lambda url: None,
    pools: Pools | None = None,
) -> int:
    """Serve until told to stop; the exit code. `routers` are routes beside the server's own.

    `on_listening` is told the server's address before the model is loaded. `pools` are models beside the engine's.
    """
    check_exposure(settings)
    logs.set_up(as_json=settings.log_json)
    end = _End()
    app = create_app(settings, open_engine, routers=routers, pools=pools, on_end=end.nothing_left)
    serving: Serving = app.state.serving
    with _listen(settings) as listener:
        on_listening(f"http://{_address(listener)}")
        asyncio.run(_serve(serving, app, end, listener))
    if serving.failure is not None:
        raise serving.failure
    if serving.hangs:
        logs.warn("leaving an engine whose step does not end", seconds=round(serving.step_seconds, 1))
        _leave(end.code or 1)
    if serving.loader is not None and serving.loader.is_alive():
        _leave(end.code)
    return end.code


def _leave(code: int) -> None:
    """End the process while a thread still loads or computes: it cannot be stopped, and Python would trip over it."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def check_exposure(settings: Settings) -> None:
    """Refuse to listen on every address for anyone under any name; warn where anyone may come."""
    if settings.host in EVERYWHERE and settings.key_file is None and not settings.allowed_hosts:
        raise InvalidInput(
            f"host {settings.host!r} is reachable from elsewhere; give --keys FILE (made with --new-key), or name what "
            "clients call this server with --allowed-host, or allow any name with --allowed-host '*'"
        )


async def _serve(serving: Serving, app: FastAPI, end: _End, listener: socket.socket) -> None:
    settings = serving.settings
    server = _Server(configure(settings, app))
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, end.signalled, number)
    address = _address(listener)
    logs.info("listening", url=f"http://{address}", keys=0 if serving.keys is None else len(serving.keys))
    if not settings.on_loopback and serving.keys is None:
        logs.warn("anyone who can reach this address can use this server: it has no keys")
    work = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait({work, asyncio.create_task(end.first.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await _wind_down(serving, end)
    finally:
        server.should_exit = True
        await work


async def _wind_down(serving: Serving, end: _End) -> None:
    """Let what is under way finish, for as long as there is reason to."""
    if serving.failure is not None:
        return
    alive = serving.state != "dead"
    serving.draining = True
    limit = serving.settings.drain_timeout if alive else LAST_LOOK
    if alive:
        logs.info("draining", requests=len(serving.ends), seconds=limit)
    deadline = asyncio.get_running_loop().time() + limit
    while asyncio.get_running_loop().time() < deadline and not end.quick:
        if not serving.ends and alive:
            break
        await asyncio.sleep(LOOK)
    if serving.ends:
        logs.warn("ending requests that are under way", requests=len(serving.ends))
    for stop in list(serving.ends):
        stop(ApiError(503, "the server is shutting down", code="draining"))


class _End:
    """Why the server ends, and with which code."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.quick = False
        self.code = 0

    def signalled(self, number: int) -> None:
        """A signal came: the first drains, the second does not wait."""
        if self.first.is_set():
            self.quick = True
            self.code = self.code or 128 + number
        self.first.set()

    def nothing_left(self) -> None:
        """There is nothing left to serve."""
        self.code = 1
        self.first.set()


class _Server(uvicorn.Server):
    """uvicorn's server, without its way with signals: it would end the process by the signal it got."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def configure(settings: Settings, app: FastAPI) -> uvicorn.Config:
    """uvicorn, as every server here runs it."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol(settings),
        loop="asyncio",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=END_SECONDS,
    )


def _listen(settings: Settings) -> socket.socket:
    """The socket, before anything is loaded: an address that cannot be had is known at once."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(min(settings.max_connections, socket.SOMAXCONN))
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; choose another --host or "
            "--port (0 takes a free one)"
        ) from None
    listener.setblocking(False)
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
