"""The server against its own OpenAPI document, by schemathesis: requests that follow it, and requests that do not.

No answer is a 5xx, every one has a status and a shape that the document has, and errors are OpenAI's. A neighbour's
tokens stay what they were, and in the end no page is held. HEADWAY_FUZZ_SECONDS sets how long the long run takes.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import requests

from support.fuzzing import PROGRAM, Fuzzer
from support.live import Live
from support.small import at_rest, tokens_of

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
EVERYWHERE = (  # routes of every part of the server
    *("/v1/conversations", "/v1/files", "/v1/batches", "/infill", "/api/generate", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/classify", "/pooling", "/v1/audio/transcriptions"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/completion", "/apply-template", "/api/embeddings", "/ping"),
    *("/v1/programs", "/v1/programs/{id}/messages", "/lab/api/trace", "/lab/api/branches"),
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
    fuzz(served, 0, 0, paths=ANSWERED, examples=6)


def stored(url: str, session: requests.Session) -> dict[str, list[str]]:
    """Things that routes name by their ids."""

    def post(path: str, **body: Any) -> Any:
        return session.post(f"{url}{path}", json=body, timeout=60).json()

    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
    files = {"file": ("rows.jsonl", json.dumps(line).encode())}
    file = session.post(f"{url}/v1/files", files=files, data={"purpose": "batch"}, timeout=60).json()["id"]
    batch = post("/v1/batches", input_file_id=file, endpoint="/v1/completions", completion_window="24h")["id"]
    conversation = post("/v1/conversations", items=[{"type": "message", "role": "user", "content": "hello"}])["id"]
    (item,) = session.get(f"{url}/v1/conversations/{conversation}/items", timeout=60).json()["data"]
    response = post("/v1/responses", input="hello", max_output_tokens=2)["id"]
    program = post("/v1/programs", source=PROGRAM)["id"]
    session.put(f"{url}/v1/installed_programs/echo", json={"source": PROGRAM}, timeout=60).raise_for_status()
    named = {"file_id": file, "batch_id": batch, "conversation_id": conversation, "item_id": item["id"]}
    named |= {"id": program, "name": "echo"}
    return {name: [one] for name, one in {"model": "smollm2", "response_id": response, **named}.items()}


def fuzz_whole(whole: tuple[Live, str], seconds: float, number: int, examples: int) -> None:
    served, key = whole
    session = requests.Session()
    session.headers["authorization"] = f"Bearer {key}"
    ids = stored(served.url, session)
    fuzzer = Fuzzer(served, session, ids)
    fuzzer.rounds(seconds, number, examples=examples)
    asked = {label for label, _ in fuzzer.seen}
    assert asked == fuzzer.operations
    assert {f"POST {path}" for path in EVERYWHERE} <= asked
    for route in (
        "POST /v1/programs",
        "PUT /v1/installed_programs/{name}",
        "POST /lab/api/trace",
        "POST /lab/api/branches",
    ):
        assert fuzzer.seen[route, 200] > 0, fuzzer.seen
    for id in {*fuzzer.responses, *ids["response_id"]}:  # those that are stored hold their contexts
        assert session.delete(f"{served.url}/v1/responses/{id}", timeout=60).status_code in (200, 404)
    at_rest(served)


@pytest.mark.slow
def test_every_route_there_is_is_as_it_is_described(whole: tuple[Live, str]) -> None:
    fuzz_whole(whole, 0, 1, examples=4)


@pytest.mark.slow
@pytest.mark.timeout(LONG + 600)
def test_the_server_is_as_it_describes_itself_for_long(served: Live) -> None:
    fuzz(served, LONG / 2, int(time.time()))


@pytest.mark.slow
@pytest.mark.timeout(LONG + 600)
def test_every_route_is_as_it_is_described_for_long(whole: tuple[Live, str]) -> None:
    fuzz_whole(whole, LONG / 2, int(time.time()), examples=15)
