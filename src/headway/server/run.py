"""Runs a server in this process: listen, load, serve, drain, exit. What `headway serve` does.

first SIGTERM or Ctrl-C    /health and new requests get 503, requests in flight finish or time out; exit code 0
second one                 requests in flight are cancelled; exit code 128 + the signal's number
the engine's worker dies   /health gets 503, requests in flight fail; exit code 1 (several models: it loads again)
the engine gets stuck      /health gets 503; the server does not wait for it on exit; exit code 1
the model cannot load      its error is raised (several models: it is tried again later)
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import APIRouter
from starlette.applications import Starlette
from starlette.types import ASGIApp

from headway.base.errors import InvalidInput
from headway.sandbox.confinement import confinement
from headway.server import logs
from headway.server.app import create_app
from headway.server.errors import ApiError
from headway.server.middleware.connection import connection_class
from headway.server.middleware.tls import tls_class
from headway.server.middleware.websocket import websocket_class
from headway.server.models import ModelSources
from headway.server.pooling import PoolingModels
from headway.server.serving import Serving
from headway.server.sessions.sockets import is_answered, listen_for_sessions
from headway.server.settings import EVERYWHERE, ServerSettings

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter

DEAD_SECONDS = 1.5  # for monitors to see that the engine is dead, and for responses to be sent
POLL_SECONDS = 0.05
CANCEL_SECONDS = 2  # for cancelled requests to finish
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    settings: ServerSettings,
    models: Callable[[], Engine] | ModelSources,
    routers: Sequence[APIRouter] = (),
    on_listening: Callable[[str], None] = lambda url: None,
    pooling_models: PoolingModels | None = None,
    *,
    open_drafter: Callable[[], Drafter] | None = None,
) -> int:
    """Serve one engine or several models until stopped; returns the exit code. `routers` are additional routes.

    `on_listening` is called with the server's URL before the model is loaded. `pooling_models` are served
    along with the engine's model. `open_drafter` opens what drafts tokens for every request.
    """
    check_exposure(settings)
    check_certificate(settings)
    logs.set_up(as_json=settings.log_json)
    if settings.programs is not None:  # compiles the sandbox's guest, the first time
        confinement(settings.programs, unconfined=settings.unconfined, log=logs.info)
    shutdown = Shutdown()
    app = create_app(
        settings,
        models,
        routers=routers,
        pooling_models=pooling_models,
        open_drafter=open_drafter,
        on_engine_end=shutdown.engine_ended,
    )
    serve_app(app, shutdown, on_listening)
    serving: Serving = app.state.serving
    if serving.failure is not None:
        raise serving.failure
    if stuck := serving.stuck_models():
        logs.warn("exiting while the engine is stuck", seconds=round(stuck[0].step_seconds, 1))
        _exit_now(shutdown.code or 1)
    if serving.loaders.is_busy:
        _exit_now(shutdown.code)
    return shutdown.code


def serve_app(app: Starlette, shutdown: Shutdown, on_listening: Callable[[str], None] = lambda url: None) -> None:
    """Serve an application until it is told to shut down, and drain it. Its `state.serving` has the settings."""
    serving: Serving = app.state.serving
    settings = serving.settings
    try:
        with _listen(settings) as listener, _removed(settings.unix_socket), _listen_for_sessions(settings) as sessions:
            app.state.session_listener = sessions
            on_listening(_url(settings, listener))
            asyncio.run(_serve(serving, app, shutdown, listener))
    finally:
        logs.flush()


def _exit_now(code: int) -> None:
    """Exit the process while a thread still loads or computes: it cannot be stopped, and Python would wait for it."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def check_exposure(settings: ServerSettings) -> None:
    """Raise if the server would listen on every address, without keys and for any Host."""
    if (
        settings.unix_socket is None
        and settings.host in EVERYWHERE
        and settings.key_file is None
        and not settings.allowed_hosts
    ):
        raise InvalidInput(
            f"host {settings.host!r} is reachable from other machines; pass --keys FILE (from --new-key), or name the "
            "hosts that clients may use with --allowed-host, or allow any with --allowed-host '*'"
        )


def check_certificate(settings: ServerSettings) -> None:
    """Raise if the certificate and its key cannot be used, before a model is loaded."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, _no_password
        )
    except OSError as error:  # ssl's errors are among them
        raise InvalidInput(
            f"the certificate {str(settings.ssl_certfile)!r} and the key {str(settings.ssl_keyfile)!r} cannot be used: "
            f"{error.strerror or error}; pass PEM files that belong together"
        ) from None


def _no_password() -> str:
    """A key with a password would make a server wait at the terminal."""
    raise InvalidInput("the key of --ssl-keyfile has a password; pass one without")


async def _serve(serving: Serving, app: Starlette, shutdown: Shutdown, listener: socket.socket) -> None:
    settings = serving.settings
    server = QuietServer(configure(settings, app))
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, shutdown.on_signal, number)
    logs.info("listening", url=_url(settings, listener), keys=0 if serving.keys is None else len(serving.keys))
    if not settings.on_loopback and serving.keys is None:
        logs.warn("anyone who can reach this address can use this server: it has no API keys")
    work = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait({work, asyncio.create_task(shutdown.requested.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await _drain(serving, shutdown)
    finally:
        server.should_exit = True
        await work


async def _drain(serving: Serving, shutdown: Shutdown) -> None:
    """Let requests in flight finish within the drain timeout, then cancel the rest."""
    if serving.failure is not None:
        return
    alive = serving.state != "dead"
    serving.draining = True
    limit = serving.settings.drain_timeout if alive else DEAD_SECONDS
    if alive:
        logs.info("draining", requests=len(serving.cancels), seconds=limit)
    deadline = asyncio.get_running_loop().time() + limit
    while asyncio.get_running_loop().time() < deadline and not shutdown.immediate:
        if not serving.cancels and alive:
            break
        await asyncio.sleep(POLL_SECONDS)
    if serving.cancels:
        logs.warn("cancelling requests in flight", requests=len(serving.cancels))
    for cancel in list(serving.cancels):
        cancel(ApiError(503, "the server is shutting down", code="draining"))


class Shutdown:
    """Whether the server is to stop, and its exit code."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.immediate = False
        self.code = 0

    def on_signal(self, number: int) -> None:
        """Handle a signal: the first one drains, the second one does not wait."""
        if self.requested.is_set():
            self.immediate = True
            self.code = self.code or 128 + number
        self.requested.set()

    def engine_ended(self) -> None:
        """The engine could not be loaded or has died."""
        self.code = 1
        self.requested.set()


class QuietServer(uvicorn.Server):
    """uvicorn's server without its signal handling, which would kill the process with the signal it got."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def configure(settings: ServerSettings, app: ASGIApp) -> uvicorn.Config:
    """The uvicorn configuration of every server here."""
    connection = connection_class(settings)
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=connection if settings.ssl_certfile is None else tls_class(settings, connection),
        loop="asyncio",
        ws=websocket_class(settings),
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,  # a small frame must not become a large message
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        root_path=settings.root_path,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=CANCEL_SECONDS,
    )


def _listen(settings: ServerSettings) -> socket.socket:
    """A listening socket, opened before anything is loaded so that an address in use is reported at once."""
    if settings.unix_socket is not None:
        return _listen_at(settings.unix_socket, settings)
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
            "--port (0 picks a free one)"
        ) from None
    listener.setblocking(False)
    return listener


def _listen_at(path: Path, settings: ServerSettings) -> socket.socket:
    """A Unix socket for this user and group. One that nobody listens to any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not is_answered(path):
            path.unlink()
        mask = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(min(settings.max_connections, socket.SOMAXCONN))
    except OSError as error:
        listener.close()
        raise InvalidInput(
            f"cannot listen on {str(path)!r}: {error.strerror or error}; choose another --unix-socket"
        ) from None
    listener.setblocking(False)
    return listener


@contextmanager
def _listen_for_sessions(settings: ServerSettings) -> Generator[socket.socket | None, None, None]:
    """The socket of `session_socket`, opened like the other, and removed at the end."""
    if settings.session_socket is None:
        yield None
        return
    with listen_for_sessions(settings.session_socket) as listener, _removed(settings.session_socket):
        yield listener


@contextmanager
def _removed(path: Path | None) -> Generator[None, None, None]:
    """Remove the Unix socket at the end."""
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    if settings.unix_socket is not None:
        return f"{settings.scheme}+unix:{settings.unix_socket}"
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{settings.scheme}://{address}"
