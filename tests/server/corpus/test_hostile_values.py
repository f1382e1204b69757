"""Values that are too many, too large, out of range, or at the edge of what a float can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.live import Live
from support.small import PROMPT

C, M = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
FAR = (-1, 10**6, 2**31, 2**32, 2**63, 2**64, 10**30)
MILLION = 1_000_000
MANY = 200_000


def request_body(path: str, **more: Any) -> dict[str, Any]:
    return ({"prompt": PROMPT} if path == C else {"messages": USER}) | {"max_tokens": 4} | more


@pytest.mark.parametrize("path", [C, M])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids"])
def test_ids_out_of_range(served: Live, path: str, field: str) -> None:
    for id in FAR:
        forms: dict[str, list[Any]] = {
            "logit_bias": [{str(id): 100}, {"5": 1, str(id): -100}],
            "bad_words": [[[id]], [[5, id, 5]]],
        }
        for value in forms.get(field, [[id], [5, id]]):
            error = served.refused(path, **request_body(path, **{field: value}))
            assert error["param"] == field
            assert str(id) in error["message"]


def test_ids_out_of_range_in_prompts(served: Live) -> None:
    for id in FAR:
        for prompt in ([id], [5, id], [[5], [5, id]]):
            assert served.refused(C, prompt=prompt)["param"] == "prompt"
        assert served.refused("/detokenize", tokens=[5, id])["code"] == "invalid_token"


def refused_whole(served: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a large body, which must be a short one."""
    response = served.ask("POST", path, json.dumps(body, separators=(",", ":")).encode())
    assert response.status == 400, response.body[:300]
    assert len(response.body) < 1000
    return response.error


@pytest.mark.parametrize("path", [C, M])
def test_a_million_stop_strings(served: Live, path: str) -> None:
    """Each of them would be looked for at every token."""
    stops = [f"{i:x}" for i in range(700_000)] + ["a"] * 300_000  # within the size that a body may have
    error = refused_whole(served, path, request_body(path, stop=stops))
    assert (error["param"], error["code"]) == ("stop", "too_many")
    assert "the body has, with those of 'stop', more than 131072 lists, objects and texts" in error["message"]


@pytest.mark.parametrize("field", ["bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias", "choice"])
def test_many_of_anything(served: Live, field: str) -> None:
    values: dict[str, Any] = {
        "bad_words": [[5]] * MANY,
        "stop_token_ids": [5] * MANY,
        "allowed_token_ids": [5] * MANY,
        "logit_bias": {str(i): 1 for i in range(MANY)},
    }
    shaped = {"structured_outputs": {"choice": ["a"] * MANY}} if field == "choice" else {field: values[field]}
    assert refused_whole(served, C, request_body(C, **shaped))["param"] in (field, "structured_outputs")


def test_many_messages_tools_prompts_and_fields(served: Live) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for path, body in (
        (M, {"messages": USER * 50_000}),
        (M, request_body(M, tools=[tool] * 50_000)),
        (C, {"prompt": ["a"] * MANY}),
        (C, {"prompt": [[5]] * MANY}),
        (C, {"prompt": [5] * MANY}),
        (C, {"prompt": "word " * MILLION}),
        (C, request_body(C, **{f"f{i}": 1 for i in range(MANY)})),
        ("/tokenize", {"prompt": "word " * MILLION}),
    ):
        refused_whole(served, path, body)


@pytest.mark.parametrize("count", [10**9, 2**64, -(10**9)])
def test_counts_beyond_reason(served: Live, count: int) -> None:
    for path, field in (
        (C, "n"),
        (M, "n"),
        (C, "best_of"),
        (C, "max_tokens"),
        (M, "max_tokens"),
        (M, "max_completion_tokens"),
        (C, "min_tokens"),
        (C, "logprobs"),
        (C, "prompt_logprobs"),
    ):
        body = request_body(path) | {field: count}
        if field == "max_completion_tokens":
            del body["max_tokens"]
        error = served.refused(path, **body)
        assert str(count)[:9] in error["message"]
    error = served.refused(M, **request_body(M, logprobs=True, top_logprobs=count))
    assert str(count)[:9] in error["message"]


def test_a_crowd_within_the_limits_is_refused_when_it_adds_up(served: Live) -> None:
    """64 choices of 256 prompts are each allowed, and together more than the queue takes."""
    error = served.refused(C, prompt=["a"] * 256, n=64, max_tokens=200)
    assert error["code"] == "request_too_large"


EDGES: list[dict[str, Any]] = [
    {"temperature": 5e-324},
    {"temperature": 1e-40},
    {"temperature": 1e308},
    {"top_p": 5e-324},
    {"min_p": 1.0},
    {"typical_p": 5e-324},
    {"top_k": 10**9},
    {"top_k": 2**63},
    {"top_k": 10**30},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e308},
    {"presence_penalty": 1e308, "frequency_penalty": 1e308},
    {"presence_penalty": -1e308, "frequency_penalty": -1e308},
    {"logit_bias": {"5": 1e308, "6": 1e308}},
    {"logit_bias": {"5": 1e308, "6": -1e308}},
    {"logit_bias": {str(i): -1e308 for i in range(256)}},
    {"logit_bias": {str(i): -1e308 for i in range(256)}, "temperature": 1e-40, "repetition_penalty": 1e308},
    {"allowed_token_ids": [5], "logit_bias": {"5": -1e308}, "temperature": 1e-40},
    {"allowed_token_ids": [5], "bad_words": [[5]]},
    {"seed": 2**64 - 1},
    {"priority": 1000},
    {"priority": -1000},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_numbers_at_the_edge(served: Live, part: int, stream: bool) -> None:
    """Answered with tokens of the vocabulary and numbers that JSON has, or refused; never a failure."""
    ranked = {"logprobs": 3, "logprobs_mode": "processed", "stream": stream}
    for edge in EDGES[part::4]:
        response = served.post(C, prompt=PROMPT, max_tokens=6, ignore_eos=True, **ranked, **edge)
        assert response.status in (200, 400), (edge, response.body)
        for text in response.body.decode().split("data: ") if stream else [response.body.decode()]:
            if text and not text.startswith("[DONE]"):
                result = json.loads(text, parse_constant=pytest.fail)
                assert "error" not in result or result["error"]["type"] == "invalid_request_error", (edge, result)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "1" + "0" * 5000, "true", '"1"', "{}"])
def test_numbers_that_are_none(served: Live, text: str) -> None:
    for field in ("temperature", "top_p", "n", "seed", "max_tokens", "priority", "presence_penalty", "logit_bias"):
        body = (
            f'{{"prompt": "a", "{field}": {text}}}'
            if field != "logit_bias"
            else f'{{"prompt": "a", "logit_bias": {{"5": {text}}}}}'
        )
        response = served.ask("POST", C, body.encode())
        assert response.status == 400, (field, response.body)
        assert response.error["message"]
        assert len(response.body) < 1000


@pytest.mark.parametrize(
    "text", ["\x00", "\ud800", "\U0010ffff" * 50, "\u202e" * 50, "\r\n" * 50, "a" + "\u0301" * 100]
)
def test_strange_texts(served: Live, text: str) -> None:
    """Anywhere a text may stand: answered or refused, whatever it is."""
    for path, body in (
        (C, {"prompt": text, "max_tokens": 2}),
        (C, request_body(C, stop=[text])),
        (C, request_body(C, bad_words=[text])),
        (C, request_body(C, model=text)),
        (C, request_body(C, user=text)),
        (C, request_body(C, structured_outputs={"choice": [text]})),
        (C, request_body(C, structured_outputs={"regex": text})),
        (M, {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
        (M, {"messages": [{"role": text, "content": "a"}], "max_tokens": 2}),
        (M, {"messages": [{"role": "user", "content": "a", "name": text}], "max_tokens": 2}),
        ("/tokenize", {"prompt": text}),
    ):
        response = served.post(path, **body)
        assert response.status in (200, 400, 404), (path, body, response.body)
        if response.status != 200:
            assert response.error["message"]
