"""A server with the Lab on a loopback port, in a thread of this process; it can be stopped and started again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

import headway as hw
from headway.server import lab
from headway.server.app import create_app
from headway.server.settings import ServerSettings
from support.live import PATIENCE, Live


@contextmanager
def listening(open_engine: Callable[[], hw.Engine], port: int = 0, **settings: Any) -> Iterator[int]:
    """Serve what `open_engine` opens, from before it is there; gives the port."""
    how = ServerSettings(**{"model": "smollm2", "port": port, **settings})
    app = create_app(how, open_engine, routers=[lab.router])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), name="served-lab", daemon=True)
    thread.start()
    try:
        end = time.monotonic() + PATIENCE
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


@contextmanager
def lab_live(engine: hw.Engine, port: int = 0, **settings: Any) -> Iterator[Live]:
    """Serve an engine with the Lab; it is closed at the end."""
    with listening(lambda: engine, port, **settings) as taken:
        served = Live(taken, engine)
        served.until(lambda: served.get("/health").status == 200)
        yield served
