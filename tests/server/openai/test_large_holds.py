"""Large bodies of all kinds: no piece of their work keeps the others waiting for long, measured in CPU time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headway as hw
from headway.server.pooling import PoolingModels
from support import encoders
from support.holds import HoldMeter, copy_seconds
from support.live import Live, live
from support.sweeps import swept

SIZE = 7_000_000
TRIES = 6
LONGEST = 0.6  # the longest hold, in copies of 64 MiB: some 12 ms where that copy takes 20
PROSE = "The quick brown fox jumps over the lazy dog. " * 160_000
USER = {"role": "user", "content": "hi"}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
FORM = "multipart/form-data; boundary=x"


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}} | more}


def said(count: int, size: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": PROSE[:size]} for i in range(count)]


def numbered(count: int, value: Any) -> dict[str, Any]:
    return {f"name{i}": value for i in range(count)}


def called(arguments: str) -> list[dict[str, Any]]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return [USER, {"role": "assistant", "tool_calls": calls}]


def schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": numbered(count, {"type": "string", "description": "a field"})}


def parts(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, "text": PROSE[:400]}] * 16_000}]


def upload() -> bytes:
    head = b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    file = b'; filename="a.jsonl"'
    return head % (b"purpose", b"", b"batch") + head % (b"file", file, b"\r\n--y" * (SIZE // 5)) + b"--x--\r\n"


JSON_BODIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "arguments of a call": (CHAT, lambda: {"messages": called(json.dumps(numbered(300_000, 1)))}),
    "description of a tool": (CHAT, lambda: {"messages": [USER], "tools": [tool(description=PROSE[:1_000_000])]}),
    "schema of a tool": (CHAT, lambda: {"messages": [USER], "tools": [tool(parameters=schema(60_000))]}),
    "ids": (TEXT, lambda: {"prompt": [20_000 + i % 9000 for i in range(1 << 20)], "max_tokens": 1}),
    "messages": (CHAT, lambda: {"messages": said(4096, 1700)}),
    "one message": (CHAT, lambda: {"messages": said(1, SIZE)}),
    "parts": (CHAT, lambda: {"messages": parts("text")}),
    "escapes": (CHAT, lambda: {"messages": [USER | {"content": 'é\n"😀' * 250_000}]}),
    "schema": (CHAT, lambda: {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": schema(60_000)}}}),
    "choices": (CHAT, lambda: {"messages": [USER], "structured_outputs": {"choice": [PROSE[:60]] * 100_000}}),
    "bias": (CHAT, lambda: {"messages": [USER], "logit_bias": {str(i): 1 for i in range(120_000)}}),
    "variables": (CHAT, lambda: {"messages": [USER], "chat_template_kwargs": numbered(120_000, "") | {"tools": 1}}),
    "a name": (CHAT, lambda: {"messages": [USER], "model": PROSE}),
    "long text, cut": (TEXT, lambda: {"prompt": PROSE[:900_000], "truncate_prompt_tokens": 9, "max_tokens": 1}),
    "one word, cut": (TEXT, lambda: {"prompt": "a" * 900_000, "truncate_prompt_tokens": 9, "max_tokens": 1}),
    "tokens": ("/detokenize", lambda: {"tokens": [20_000 + i % 9000 for i in range(1 << 18)]}),
    "items": (RESPONSES, lambda: {"input": said(4096, 1600)}),
    "parts of an item": (RESPONSES, lambda: {"input": parts("input_text")}),
    "blocks": (MESSAGES, lambda: {"model": "smollm2", "max_tokens": 1, "messages": parts("text")}),
    "calls": ("/api/chat", lambda: {"model": "smollm2", "messages": [USER, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": numbered(120_000, 1)}}]}]}),
    "other files": ("/infill", lambda: {"input_extra": [{"text": PROSE[:60]}] * 40_000}),
    "a native prompt": ("/completion", lambda: {"prompt": [1, PROSE]}),
    "a template": ("/apply-template", lambda: {"messages": said(2000, 2000)}),
    "embeddings": ("/v1/embeddings", lambda: {"input": [PROSE[:53]] * 120_000}),
    "documents": ("/rerank", lambda: {"query": "a", "documents": [PROSE[:3400]] * 2048, "truncate_prompt_tokens": -1}),
}  # fmt: skip


def body_of(name: str) -> tuple[str, bytes, str]:
    if name == "an upload":
        return "/v1/files", upload(), FORM
    path, make = JSON_BODIES[name]
    return path, json.dumps(make()).encode(), "application/json"


@pytest.fixture(scope="module")
def server(smollm2_path: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models") / "small-rerank"
    encoders.model("bert", "classify", num_labels=1).save_pretrained(folder)
    encoders.tokenizer("bert").save_pretrained(folder)
    pooling = PoolingModels({"rerank": str(folder)}, device="cpu")
    with live(hw.Engine("smollm2", pages=512, threads=1), pooling, max_queue_tokens=1000) as server:
        yield server


@pytest.fixture(scope="module")
def copy() -> float:
    return copy_seconds()


@pytest.mark.parametrize("name", swept([*JSON_BODIES, "an upload"], 4))
def test_no_work_for_a_large_body_holds_the_others_up(server: Live, copy: float, name: str) -> None:
    path, body, kind = body_of(name)
    longest, where = [], ""
    for _ in range(TRIES):
        with HoldMeter() as meter:
            assert server.ask("POST", path, body, {"content-type": kind}).status in (200, 400, 404)
        longest.append(round(meter.longest / copy, 2))
        where = meter.where
        if longest[-1] < LONGEST:
            return
    pytest.fail(f"the longest holds are {longest} copies of 64 MiB; the last one was at\n{where}")


def test_a_tool_with_a_description_of_a_megabyte_is_read(server: Live) -> None:
    """Its limit is on all tools together, in bytes; what remains of the prompt after the cut is answered."""
    tools = [tool(description=PROSE[:1_000_000])]
    fields = {"messages": [USER], "tools": tools, "max_tokens": 1}
    answer = server.post(CHAT, **fields, truncate_prompt_tokens=9)
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["prompt_tokens"] == 9
    assert "KV cache holds 8192 tokens" in server.refused(CHAT, **fields)["message"]
    tools = [tool(description=PROSE[:1_100_000])]
    assert server.refused(CHAT, messages=[USER], tools=tools)["code"] == "schema_too_large"
