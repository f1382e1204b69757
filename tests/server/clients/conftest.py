"""One server with the real default model for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import headway as hw
from support.live import Live, live


@pytest.fixture(scope="session")
def served(smollm2_path) -> Iterator[Live]:
    with live(hw.Engine("smollm2", pages=512, threads=1)) as server:
        yield server
