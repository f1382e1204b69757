"""Answers with many log-probabilities: every choice has those of its prompt, and the event loop does not write them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.server.api.respond import INLINE_LOGPROBS, TokenUsage, _events, _whole_body
from headway.server.api.streaming import json_bytes, json_bytes_in_pieces
from headway.server.threads import WorkerThreads

PROMPT = "The quick brown fox jumps over the lazy dog, and then"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=30,
)


@given(VALUES)
def test_what_is_written_in_pieces_is_the_same(value: Any) -> None:
    assert json_bytes_in_pieces(value) == json_bytes(value)


class Large:
    """An answer that is ready only once the event loop has done something else."""

    id_prefix, object, chunk_object, usage, response_size = "x", "x", "x", TokenUsage(), INLINE_LOGPROBS + 1

    def __init__(self) -> None:
        self.free = threading.Event()

    async def run(self, put: Any) -> None: ...

    def add(self, delta: Any, admitted: Any) -> None: ...

    def response(self) -> dict[str, Any]:
        assert self.free.wait(60), "the event loop writes this answer itself"
        return {"choices": [{"logprobs": [1.5, None]}]}

    def chunk_size(self, deltas: Iterable[Any]) -> int:
        return INLINE_LOGPROBS + 1

    def chunks(self, delta: Any) -> Iterable[dict[str, Any]]:
        yield {"choices": [delta]}


def test_a_large_answer_is_written_beside_the_event_loop() -> None:
    async def both() -> bytes:
        job, threads = Large(), WorkerThreads("test", 1)
        response = asyncio.create_task(_whole_body(job, {"id": "a"}, threads, dict))
        await asyncio.sleep(0)
        job.free.set()
        return await response

    result = json.loads(asyncio.run(both()))
    assert result["choices"] == [{"logprobs": [1.5, None]}]
    written = _events(Large(), {"id": "a"}, [1, 2], dict)
    assert _events(Large(), {"id": "a"}, [1, 2], dict, json_bytes_in_pieces) == written


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_every_choice_has_the_prompt_it_echoes(served, max_tokens):
    request_body = {"echo": True, "logprobs": 64, "prompt_logprobs": 2, "max_tokens": max_tokens, "seed": 1}
    (alone,) = served.complete(PROMPT, **request_body)["choices"]
    choices = served.complete([PROMPT, "Another one"], n=3, **request_body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    count = len(served.engine.tokenizer.encode(PROMPT))
    for choice in choices[:3]:
        assert choice["prompt_logprobs"] == alone["prompt_logprobs"]
        for name, values in choice["logprobs"].items():
            assert values[:count] == alone["logprobs"][name][:count]
            assert len(values) == count + max_tokens
    assert choices[0] == alone
    assert len(choices[3]["prompt_logprobs"]) < count


def test_a_stream_echoes_the_same(served):
    request_body = {"echo": True, "logprobs": 64, "n": 2, "max_tokens": 3, "seed": 1}
    prompt = PROMPT * 4  # more than the event loop writes itself
    whole = served.complete(prompt, **request_body)["choices"]
    assert sum(len(top or ()) for top in whole[0]["logprobs"]["top_logprobs"]) > INLINE_LOGPROBS
    streamed: dict[int, dict[str, list[Any]]] = {0: {}, 1: {}}
    for event in served.post("/v1/completions", prompt=prompt, stream=True, **request_body).events:
        for choice in event["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                streamed[choice["index"]].setdefault(name, []).extend(values)
    assert [streamed[i] for i in (0, 1)] == [choice["logprobs"] for choice in whole]
