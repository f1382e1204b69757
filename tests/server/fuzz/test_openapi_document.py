"""The server against its own OpenAPI document, by schemathesis: requests that follow it, and requests that do not.

No answer is a 5xx, every one has a status and a shape that the document has, and errors are OpenAI's. A neighbour's
tokens stay what they were, and in the end no page is held. HEADWAY_FUZZ_SECONDS sets how long the long run takes.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from support.fuzzing import Fuzzer
from support.live import Live
from support.small import at_rest, tokens_of

SHORT = 4.0  # seconds, and one round in any case
LONG = float(os.environ.get("HEADWAY_FUZZ_SECONDS", "1200"))
ANSWERED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)


def fuzz(served: Live, seconds: float, number: int, **how: Any) -> None:
    right = tokens_of(served)
    fuzzer = Fuzzer(served)
    fuzzer.rounds(seconds, number, **how)
    assert tokens_of(served) == right
    at_rest(served)
    for path in ANSWERED:  # the drawing is of use only where both ways are taken
        assert fuzzer.seen[f"POST {path}", 200] > 0, fuzzer.seen
        assert fuzzer.seen[f"POST {path}", 400] > 0, fuzzer.seen


def test_the_server_is_as_it_describes_itself(served: Live) -> None:
    fuzz(served, SHORT, 0, paths=ANSWERED, examples=8)


@pytest.mark.slow
@pytest.mark.timeout(LONG + 600)
def test_the_server_is_as_it_describes_itself_for_long(served: Live) -> None:
    fuzz(served, LONG, int(time.time()))
