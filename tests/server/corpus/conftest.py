"""The corpus: what is known to bring servers of this kind down. In every test a bystander asks all the while.

The bystander's tokens must be those it gets alone, and in the end every page is free or cached and none is held.

    ids out of range in bias, allowed and bad words   test_hostile_values      openai/test_invalid_requests
    a million stop strings, and other crowds          test_hostile_values      openai/test_invalid_requests
    n = 10^9, and other counts                        test_hostile_values      openai/test_invalid_requests
    numbers at the edge of floats                     test_hostile_values      openai/test_mixtures
    schemas 30,000 deep, grammars that grow           test_hostile_grammars    fuzz/test_openapi_document
    regex bombs                                       test_hostile_grammars
    template injection in messages                    test_hostile_templates   text/test_chat
    template injection in model files                 test_hostile_templates   text/test_chat
    Host tricks                                       test_hostile_clients     process/test_access
    a slow client, writing or reading                 test_hostile_clients     process/test_attacks
    disconnects at every point                        test_hostile_clients     process/test_attacks, openai/test_streams
    many of these concurrently                        load/test_serving_load   process/test_attacks
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.live import Live, live
from support.small import at_rest, small_engine, tokens_of

LIMITS: dict[str, Any] = {"header_timeout": 2.0, "body_timeout": 2.0, "write_timeout": 1.0, "max_grammar_seconds": 2.0}


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(small_engine(tmp_path_factory.mktemp("small") / "model", pages=512), **LIMITS) as server:
        yield server


@pytest.fixture(scope="session")
def right(served: Live) -> Any:
    """What the bystander gets when nobody else is there."""
    return tokens_of(served)


@pytest.fixture(autouse=True)
def bystander(served: Live, right: Any) -> Iterator[None]:
    """Asks the same again and again, from before the attack until after it."""
    found: list[Any] = []
    end, asking = threading.Event(), threading.Event()

    def ask() -> None:
        while not end.is_set() or not found:
            asking.set()
            found.append(tokens_of(served))
            end.wait(0.03)  # leaves the machine to the attack

    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(ask)
        assert asking.wait(60)
        try:
            yield
        finally:
            end.set()
        pending.result()
    assert all(tokens == right for tokens in found)
    assert tokens_of(served) == right
    at_rest(served)
    assert served.get("/health").status == 200
