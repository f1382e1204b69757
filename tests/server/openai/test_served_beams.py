"""Beam search over HTTP with vLLM's fields: the sequences of transformers, in completions and in chats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import headway as hw
from support.live import Live, live
from support.small import at_rest, small_folder

PROMPT = list(b"the quick brown fox")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("beams") / "model")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Live]:
    with live(hw.Engine(folder, dtype="float32", threads=1, pages=256)) as server:
        yield server


@pytest.mark.parametrize(
    ("n", "width", "options"),
    [
        (1, 2, {}),
        (3, 3, {"length_penalty": 0.4, "early_stopping": True}),
        (2, 5, {"length_penalty": -1.0}),
        (1, 1, {}),
    ],
)
@torch.no_grad()
def test_choices_are_those_of_transformers(
    served: Live, folder: Path, n: int, width: int, options: dict[str, Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: Any = model.generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=n,
        do_sample=False,
        max_new_tokens=10,
        eos_token_id=served.engine.eos_ids[0],
        pad_token_id=0,
        **options,
    )
    ends = set(served.engine.eos_ids)
    expected = [[token for token in row[len(PROMPT) :].tolist() if token and token not in ends] for row in found]
    asked = {"use_beam_search": True, "n": n, "best_of": width, "max_tokens": 10, "return_token_ids": True, **options}
    choices = served.complete(PROMPT, **asked)["choices"]
    assert [choice["token_ids"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == list(range(n))
    at_rest(served)


def test_a_beam_has_the_logprobs_of_its_tokens(served: Live) -> None:
    asked = {"use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 70, "ignore_eos": True}
    response = served.complete(PROMPT, **asked, logprobs=3, return_token_ids=True, echo=True)
    for choice in response["choices"]:
        tokens = choice["token_ids"]
        again = served.complete([*PROMPT, *tokens], max_tokens=0, echo=True, logprobs=3)["choices"][0]["logprobs"]
        assert choice["logprobs"]["tokens"] == again["tokens"]
        for name, count in (("token_logprobs", len(tokens)), ("top_logprobs", len(tokens))):
            for mine, theirs in zip(choice["logprobs"][name][-count:], again[name][-count:], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
    assert response["usage"]["completion_tokens"] == 140
    at_rest(served)


def test_a_chat_searches_too(served: Live) -> None:
    async def program(engine: hw.Engine) -> list[str]:
        async with engine.context() as ctx:
            search = ctx.user("hello").generate(hw.Argmax(), num_beams=3, num_return_sequences=2, max_tokens=8)
            return await search.texts()

    asked: dict[str, Any] = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 8}
    choices = served.chat("hello", **asked)["choices"]
    assert [choice["message"]["content"] for choice in choices] == served.engine.run(program)
    assert {choice["finish_reason"] for choice in choices} <= {"length", "stop"}
    grammar = {"regex": "[ab]{2}|[cd]{3}"}
    (first, second) = served.chat("hello", **asked, structured_outputs=grammar, logprobs=True, top_logprobs=2)[
        "choices"
    ]
    assert first["message"]["content"] != second["message"]["content"]
    for choice in (first, second):
        assert set(choice["message"]["content"]) <= set("abcd")
        assert len(choice["logprobs"]["content"]) == len(choice["message"]["content"])
    at_rest(served)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}, "tools"),
        ({"temperature": 1}, "temperature"),
        ({"mirostat": 2}, "mirostat"),
        ({"logprobs": True, "logprobs_mode": "processed"}, "logprobs_mode"),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_name(served: Live, fields: dict[str, Any], param: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    error = served.refused("/v1/chat/completions", messages=messages, use_beam_search=True, n=2, max_tokens=4, **fields)
    assert error["param"] == param
    assert "use_beam_search" in error["message"]
    assert served.refused("/v1/chat/completions", messages=messages, best_of=2)["param"] == "best_of"


def test_logprobs_of_the_whole_vocabulary(served: Live) -> None:
    vocab = served.engine.vocab_size
    (choice,) = served.complete(PROMPT, max_tokens=2, logprobs=vocab, temperature=0)["choices"]
    assert all(len(position) >= vocab - 1 for position in choice["logprobs"]["top_logprobs"])
    (choice,) = served.chat("x", max_tokens=2, logprobs=True, top_logprobs=vocab)["choices"]
    assert sum(2.718281828 ** entry["logprob"] for entry in choice["logprobs"]["content"][0]["top_logprobs"]) == (
        pytest.approx(1, abs=1e-3)
    )
    error = served.refused("/v1/completions", prompt=PROMPT, max_tokens=2, logprobs=vocab + 1)
    assert f"logprobs is {vocab + 1}; it must be an integer in [0, {vocab}]" in error["message"]


def test_logprobs_stay_within_the_bound_of_a_response(folder: Path) -> None:
    with live(hw.Engine(folder, threads=1, pages=256), max_response_logprobs=4000, max_logprobs=100) as served:
        error = served.refused("/v1/completions", prompt="a", max_tokens=60, logprobs=99)
        assert "logprobs 99 with up to 60 generated tokens makes 6000" in error["message"]
        assert "at most 4000" in error["message"]
        error = served.refused("/v1/completions", prompt="a", max_tokens=200, logprobs=99, stream=True)
        assert "waiting tokens makes 6400" in error["message"]
        assert "in [0, 100]" in served.refused("/v1/completions", prompt="a", logprobs=101)["message"]
        served.complete("a", max_tokens=39, logprobs=99)
