"""A small engine, served on a Unix socket; tests compare what a program gives in process and through it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import headway as hw
from headway.testing import random_model
from support.through import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The engine's server; nobody holds a page at the end."""
    engine = hw.Engine(random_model(), pages=128, threads=1)
    server = Served(engine, session_grace=1.0)
    try:
        yield server
    finally:
        server.close()
        assert engine.stats().pages_held == 0
        engine.close()


@pytest.fixture
def remote(served: Served) -> Iterator[hw.RemoteEngine]:
    with hw.connect(served.url) as engine:
        yield engine
