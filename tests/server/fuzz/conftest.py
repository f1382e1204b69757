"""A server with a small random model, for requests by the thousand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.live import Live, live
from support.small import small_engine

LIMITS: dict[str, Any] = {
    "max_queue_tokens": 20_000,
    "max_grammar_seconds": 3.0,
    "request_timeout": 60.0,
    "stored_seconds": 0.5,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = tmp_path_factory.mktemp("small") / "model"
    with live(small_engine(folder), **LIMITS) as server:
        yield server
