"""What a front reads of a request is what the replica's cache holds once it is computed, whatever the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.cluster.prompts import PromptReader
from headway.cluster.routing import RouteRequest, short_key
from headway.jobs.requests import RowRequest
from headway.program.figures import page_keys
from headway.server.in_process import InProcessServer
from headway.server.keys import ANYONE
from headway.server.pooling import PoolingModels

TEXT = "The keeper of the lighthouse counted the ships that passed by every night and wrote down their names. "
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": f"The weather of a city. {TEXT}"}
TOOL = {"type": "function", "function": WEATHER | {"parameters": CITY}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Brest"}'}}
ASKED = {"role": "user", "content": f"How is the weather? {TEXT}"}
OLLAMA = {"model": "it", "stream": False, "options": {"num_predict": 1}}
CLAUDE = {"model": "it", "max_tokens": 1, "messages": [ASKED]}
PARTS = [{"type": "text", "text": f"3 {TEXT}"}, {"type": "text", "text": "And?"}]
FUNCTION = {"type": "function", "parameters": CITY, **WEATHER}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "system", "content": f"1 {TEXT}"}, ASKED]}),
    "developer": ("/v1/chat/completions", {"messages": [{"role": "developer", "content": f"2 {TEXT}"}, ASKED]}),
    "parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARTS}]}),
    "special": ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"4 <|im_end|> {TEXT}"}]}),
    "tools": ("/v1/chat/completions", {"messages": [ASKED], "tools": [TOOL]}),
    "functions": ("/v1/chat/completions", {"messages": [ASKED], "functions": [WEATHER | {"name": "other"}]}),
    "agent": (
        "/v1/chat/completions",
        {"tools": [TOOL], "messages": [{"role": "system", "content": f"5 {TEXT}"}, ASKED,
                                       {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                       {"role": "tool", "tool_call_id": CALL["id"], "content": f"rain {TEXT}"}]},
    ),
    "salt": ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"6 {TEXT}"}], "cache_salt": "own"}),
    "completion": ("/v1/completions", {"prompt": f"7 {TEXT}"}),
    "ids": ("/v1/completions", {"prompt": list(range(100, 148))}),
    "messages": ("/v1/messages", CLAUDE | {"system": [{"type": "text", "text": f"8 {TEXT}"}]}),
    "messages tools": ("/v1/messages", CLAUDE | {"system": "9", "tools": [WEATHER | {"input_schema": CITY}]}),
    "responses": ("/v1/responses", {"input": f"10 {TEXT}", "instructions": f"11 {TEXT}"}),
    "responses tools": ("/v1/responses", {"input": f"12 {TEXT}", "tools": [FUNCTION]}),
    "ollama": ("/api/chat", OLLAMA | {"messages": [{"role": "user", "content": f"13 {TEXT}"}], "tools": [TOOL]}),
    "ollama generate": ("/api/generate", OLLAMA | {"prompt": f"14 {TEXT}", "system": f"15 {TEXT}"}),
    "ollama raw": ("/api/generate", OLLAMA | {"prompt": f"16 {TEXT}", "raw": True}),
}  # fmt: skip
LIMITS = {"/v1/chat/completions": {"max_tokens": 1}, "/v1/completions": {"max_tokens": 1},
          "/v1/responses": {"max_output_tokens": 16}}  # fmt: skip


@pytest.fixture(scope="module")
def reader(smollm2_path: Path) -> PromptReader:
    return PromptReader("it", smollm2_path, 16)


@pytest.fixture(scope="module")
def replica(smollm2: hw.Engine) -> Iterator[tuple[InProcessServer, hw.Engine]]:
    engines: list[hw.Engine] = []

    def opened() -> hw.Engine:
        engines.append(hw.Engine("smollm2", pages=1024, threads=1))
        return engines[0]

    with InProcessServer("it", opened, PoolingModels({}), concurrency=4) as server:
        yield server, engines[0]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_prompt_has_the_keys_of_the_pages_that_it_leaves(
    reader: PromptReader, replica: tuple[InProcessServer, hw.Engine], name: str
):
    (server, engine), (path, body) = replica, REQUESTS[name]
    body = LIMITS.get(path, {}) | body
    before = {short_key(key) for key in page_keys(engine)}
    response = server.send(RowRequest(name, path, body)).result()
    assert response.status == 200, response.body
    keys = reader.route(path, json.dumps(body).encode(), salt=ANYONE.salt, tenant="").keys
    new = {short_key(key) for key in page_keys(engine)} - before
    assert new & set(keys)
    assert set(keys) <= new | before  # the replica has computed what the front has foreseen
    assert len(new - set(keys)) <= 1  # the reply may fill one more page


@pytest.mark.parametrize(
    "body",
    [b"", b"3", b"{}", b"[" * 100_000, b'{"messages": 3}', b'{"messages": [{}]}', b'{"messages": [], "prompt": {}}',
     b'{"messages": [{"role": "user", "content": "x"}], "tools": 3}', b'{"prompt": [1e999], "input": null}',
     b'{"prompt": [99999999999999999999, 1], "messages": null}'],
)  # fmt: skip
def test_a_request_that_cannot_be_read_has_no_keys(reader: PromptReader, body: bytes):
    paths = {path for path, _ in REQUESTS.values()}
    assert {reader.route(path, body, salt="", tenant="") for path in paths} == {RouteRequest()}
