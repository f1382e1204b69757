"""Servers that tests start, and that are stopped at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from server_process import Server, command


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Server]]:
    """Start a server: `start({settings…}, step_seconds=…)`; it is stopped at the end."""
    running: list[Server] = []

    def launch(settings: Mapping[str, Any] | None = None, **engine: Any) -> Server:
        running.append(Server(command(settings, **engine)))
        return running[-1]

    yield launch
    for server in running:
        server.stop()
