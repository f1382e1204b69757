"""llama-server's and vLLM's own routes, as their clients call them, and for how long Ollama's clients keep a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.server.llama_server.output import NativeText
from headway.server.models import ModelSources
from headway.server.ollama.keep_alive import stay_seconds
from support.live import Live, live
from support.many_models import ASKED, Loader, many, model_folders
from support.small import small_engine

PROMPT = "Once upon a time"
SAMPLING = {"temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Name it."}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(small_engine(tmp_path_factory.mktemp("small") / "model")) as server:
        yield server


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion_is_that_of_openais_route(served: Live, path: str) -> None:
    found = served.post(path, prompt=PROMPT, **SAMPLING, n_predict=6, return_tokens=True, cache_prompt=True).json
    (same,) = served.complete(PROMPT, max_tokens=6, return_token_ids=True, **SAMPLING)["choices"]
    assert (found["content"], found["tokens"]) == (same["text"], same["token_ids"])
    assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 6)
    NativeText.model_validate(found)

    events = served.post(path, prompt=PROMPT, **SAMPLING, n_predict=6, stream=True).body.decode().split("\n\n")
    read = [json.loads(event.removeprefix("data: ")) for event in events if event]
    assert "".join(event["content"] for event in read) == found["content"]
    assert [event["stop"] for event in read] == [False] * (len(read) - 1) + [True]


def test_prompts_may_be_ids_and_texts_joined(served: Live) -> None:
    ids = served.engine.tokenizer.encode(PROMPT)
    texts = served.post("/completion", prompt=["Once upon", " a time"], n_predict=4, **SAMPLING).json
    mixed = served.post("/completion", prompt=[*ids[:1], PROMPT[1:]], n_predict=4, **SAMPLING)
    plain = served.post("/completion", prompt=PROMPT, n_predict=4, **SAMPLING).json
    assert mixed.status == 200
    assert texts["tokens_evaluated"] >= plain["tokens_evaluated"] > 0


def test_probabilities_and_grammars(served: Live) -> None:
    fields = {"prompt": PROMPT, "n_predict": 3, **SAMPLING}
    ranked = served.post("/completion", **fields, n_probs=2).json["completion_probabilities"]
    assert [len(one["top_logprobs"]) for one in ranked] == [2, 2, 2]
    assert all(one["id"] == one["top_logprobs"][0]["id"] for one in ranked)
    follows = served.post("/completion", prompt=PROMPT, grammar='root ::= "x" "y"').json
    assert (follows["content"], follows["stop_type"]) == ("xy", "eos")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(served.post("/completion", prompt=PROMPT, json_schema=schema, temperature=0).json["content"]) == {
        "a": 1
    }


def test_bias_as_pairs(served: Live) -> None:
    fields = {"prompt": PROMPT, "n_predict": 3, "return_tokens": True, **SAMPLING}
    assert served.post("/completion", **fields, logit_bias=[[40, 100]]).json["tokens"] == [40, 40, 40]
    first = served.post("/completion", **fields).json["tokens"][0]
    assert first not in served.post("/completion", **fields, logit_bias=[[first, False]]).json["tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": "a", "n_predict": 0}, "n_predict"),
        ({"prompt": "a", "n_predict": 10**9}, "prompt"),
        ({"prompt": "a", "logit_bias": [[1]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [["a", True]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [[10**9, 1]]}, "logit_bias"),
        ({"prompt": "a", "repeat_last_n": 64, "repeat_penalty": 1.2}, "repeat_last_n"),
        ({"prompt": "a", "samplers": ["top_k"]}, "samplers"),
        ({"prompt": "a", "grammar": "root ::= x", "json_schema": {}}, "json_schema"),
        ({"prompt": "a", "n_probs": 10**9}, "n_probs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_it_cannot_do_is_refused_by_name(served: Live, fields: dict[str, Any], param: str | None) -> None:
    error = served.refused("/completion", **fields)
    assert error["param"] == param or param is None, error


def test_a_rendered_chat_is_the_prompt_of_that_chat(served: Live) -> None:
    text = served.post("/apply-template", messages=MESSAGES).json["prompt"]
    assert "Name it." in text
    rendered = served.post("/completion", prompt=text, n_predict=1).json["tokens_evaluated"]
    assert rendered == served.post("/tokenize", messages=MESSAGES).json["count"]
    assert served.refused("/apply-template", messages=[])["param"] == "messages"


def test_texts_are_tokenized_as_llama_server_does(served: Live) -> None:
    ids = served.engine.tokenizer.encode(PROMPT)
    assert served.post("/tokenize", content=PROMPT).json["tokens"] == ids
    pieces = served.post("/tokenize", content=PROMPT, with_pieces=True).json["tokens"]
    assert [one["id"] for one in pieces] == ids
    assert "".join(one["piece"] for one in pieces) == PROMPT
    assert served.post("/detokenize", tokens=ids).json["content"] == PROMPT
    assert served.refused("/tokenize", content="a", prompt="b")["param"] == "prompt"
    assert served.refused("/tokenize", prompt="b", add_special=True)["param"] == "add_special"


def test_routes_without_v1_and_of_monitors(served: Live) -> None:
    assert served.get("/v1/health").json == {"status": "ready"}
    assert served.post("/ping").json == {}
    assert served.get("/load").json == {"server_load": 0}
    assert served.get("/models").json == served.get("/v1/models").json
    answer = served.post("/chat/completions", messages=MESSAGES, max_tokens=2)
    assert answer.json["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((None, None), (0, 0), (5, 5), ("5m", 300), ("1h30m", 5400), ("0", 0), ("1.5s", 1.5)),
        *(("-1s", math.inf), (-1, math.inf), (1e12, math.inf)),
    ],
)
def test_durations(given: Any, seconds: Any) -> None:
    assert stay_seconds(given) == seconds


def test_a_duration_that_is_none_is_refused(served: Live) -> None:
    answer = served.post("/api/generate", model="smollm2", prompt="", keep_alive="soon")
    assert (answer.status, "keep_alive" in answer.json["error"]) == (400, True)


def test_keep_alive_unloads_a_model_and_keeps_another(tmp_path: Path) -> None:
    loader, names = Loader(), ("ada", "bob")
    sources = [loader.source(path) for path in model_folders(tmp_path, *names).values()]
    with many(ModelSources(sources, budget=1 << 30), loader) as served:
        for name in names:
            assert served.post("/v1/completions", model=name, **ASKED).status == 200
        assert served.loaded() == set(names)
        served.post("/api/generate", model="bob", keep_alive=-1)
        ended = served.post("/api/generate", model="ada", keep_alive=0).json
        assert (ended["done"], ended["done_reason"]) == (True, "unload")
        served.until(lambda: served.loaded() == {"bob"})
        (running,) = served.get("/api/ps").json["models"]
        assert running["expires_at"].startswith("0001-")
        assert served.post("/v1/completions", model="ada", **ASKED).status == 200  # which stays as others do again
        assert {one["name"] for one in served.get("/api/ps").json["models"]} == set(names)
