"""Any mixture of options is answered or refused, whole and streamed alike, and leaves nothing behind."""

from __future__ import annotations

import json
import random

import pytest

import headway as hw
from support.live import Live, live
from support.speaker import TEMPLATES, V, speaking_folder

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "listen", "parameters": SCHEMA, "strict": True}}
COMMON = {
    "temperature": [0, 0.5, 1, 3.0],
    "top_p": [0.1, 0.9, 1],
    "top_k": [-1, 0, 1, 5, 10_000],
    "min_p": [0, 0.1],
    "typical_p": [0.5],
    "repetition_penalty": [0.5, 1.2],
    "presence_penalty": [-1, 1.5],
    "frequency_penalty": [-1, 0.5],
    "logit_bias": [{}, {"65": 5}, {"66": -100, "67": 2.5}],
    "allowed_token_ids": [list(range(40, 120)), [65]],
    "bad_words": [["a", "the"], [[65, 66], "B"]],
    "max_tokens": [1, 3, 9, 30],
    "min_tokens": [0, 2, 3],
    "stop": ["a", ["x", "yz", "\n"]],
    "stop_token_ids": [[70, 71]],
    "ignore_eos": [True, False],
    "n": [1, 2, 3],
    "priority": [-3, 0.5],
    "prompt_logprobs": [0, 2],
    "logprobs_mode": ["raw", "processed"],
    "structured_outputs": [{"regex": "[a-f]{2,6}"}, {"choice": ["one", "two"]}, {"json": SCHEMA}],
    "user": ["somebody"],
}
COMPLETIONS = COMMON | {"echo": [True, False], "logprobs": [0, 1, 4], "best_of": [2, 3]}
CHATS = COMMON | {
    "logprobs": [True, False],
    "top_logprobs": [0, 2],
    "tools": [[TOOL], [TOOL, OTHER]],
    "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "look"}}],
    "parallel_tool_calls": [True, False],
    "response_format": [{"type": "text"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}],
}
PROMPTS = ["hello", [1, 2, 3], ["hello", "there is more"], [[5, 6], [7] * 40]]
TALKS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "y" * 50}],
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small random model that reads and writes bytes."""
    folder = speaking_folder(tmp_path_factory.mktemp("mixed"))
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen.jinja").read_text())
    engine = hw.Engine(folder, pages=256, threads=1)
    assert engine.vocab_size == V
    with live(engine) as server:
        yield server


def drawn(seed: int) -> tuple[str, dict[str, object]]:
    dice = random.Random(seed)
    path = dice.choice(["/v1/completions", "/v1/chat/completions"])
    options = COMPLETIONS if path == "/v1/completions" else CHATS
    body: dict[str, object] = {
        name: dice.choice(options[name]) for name in dice.sample(sorted(options), dice.randint(0, 7))
    }
    body["seed"] = seed
    body.setdefault("max_tokens", 12)
    if path == "/v1/completions":
        return path, body | {"prompt": dice.choice(PROMPTS)}
    return path, body | {"messages": dice.choice(TALKS)}


def check(small: Live, seed: int) -> bool:
    """One mixture; whether it was answered."""
    path, body = drawn(seed)
    response = small.ask("POST", path, body)
    assert response.status in (200, 400), (body, response.body)
    streamed = small.ask("POST", path, body | {"stream": True, "stream_options": {"include_usage": True}})
    if response.status == 400:
        assert response.error["message"]
        assert streamed.status == 400 or b'"error"' in streamed.body
        return False
    whole = response.json
    counts = whole["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    assert {choice["finish_reason"] for choice in whole["choices"]} <= {"stop", "length", "tool_calls"}
    if streamed.status == 200:
        _check_stream(path, whole, streamed.events)
    else:
        assert {"best_of", "prompt_logprobs"} & set(body)
    return True


def _check_stream(path, whole, events):
    *chunks, last = events
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [one for event in chunks for one in event["choices"] if one["index"] == choice["index"]]
        if path == "/v1/completions":
            assert "".join(one["text"] for one in mine) == choice["text"]
        else:
            said = "".join(one["delta"].get("content") or "" for one in mine)
            assert said == (choice["message"]["content"] or "")
            calls = [c["function"] for one in mine for c in one["delta"].get("tool_calls", ())]
            expected = [call["function"] for call in choice["message"].get("tool_calls", ())]
            assert "".join(c["arguments"] for c in calls) == "".join(c["arguments"] for c in expected)
            for call in expected if choice["finish_reason"] == "tool_calls" else ():
                assert json.loads(call["arguments"])["a"] in (1, "b")
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_mixtures_of_options(small):
    answered = sum(check(small, seed) for seed in range(50))
    assert answered > 25
    small.until(small.is_quiet)


@pytest.mark.slow
def test_many_mixtures_of_options(small):
    assert sum(check(small, seed) for seed in range(1000, 2000)) > 500
    small.until(small.is_quiet)
