"""llama-server's and vLLM's own routes, as their clients call them, and for how long Ollama's clients keep a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway as hw
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


def test_prompts_of_ids_and_texts_are_one(served: Live) -> None:
    ids = served.engine.tokenizer.encode(PROMPT)
    plain = served.post("/completion", prompt=PROMPT, n_predict=4, **SAMPLING).json
    for prompt in (ids, [*ids[:1], PROMPT[1:]], {"prompt_string": PROMPT}, [PROMPT]):
        found = served.post("/completion", prompt=prompt, n_predict=4, **SAMPLING).json
        assert (found["content"], found["tokens_evaluated"]) == (plain["content"], len(ids))
        assert (found["index"], found["prompt"]) == (0, PROMPT)


def test_a_list_of_texts_is_several_prompts(served: Live) -> None:
    ids = served.engine.tokenizer.encode("He")
    alone = [served.post("/completion", prompt=one, n_predict=4, **SAMPLING).json["content"] for one in (PROMPT, "He")]
    for prompt in ([PROMPT, "He"], [PROMPT, ids], [{"prompt_string": PROMPT}, [*ids[:1], "e"]]):
        found = served.post("/completion", prompt=prompt, n_predict=4, **SAMPLING).json
        assert [one["content"] for one in found] == alone
        assert [one["index"] for one in found] == [0, 1]
        assert [one["tokens_evaluated"] for one in found] == [len(PROMPT), 2]
    twice = served.post("/completion", prompt=[PROMPT, "He"], n=2, n_predict=4, **SAMPLING).json
    assert [one["content"] for one in twice] == [alone[0], alone[0], alone[1], alone[1]]
    events = served.post("/completion", prompt=[PROMPT, "He"], n_predict=4, stream=True, **SAMPLING).body.decode()
    read = [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n") if event]
    for index, text in enumerate(alone):
        own = [event for event in read if event["index"] == index]
        assert "".join(event["content"] for event in own) == text
        assert [event["stop"] for event in own] == [False] * (len(own) - 1) + [True]
    most = [one["tokens_predicted"] for one in served.post("/completion", prompt=[PROMPT, "He"], **SAMPLING).json]
    assert most == [256 - len(PROMPT), 256 - 2]  # each has what its prompt leaves


def test_many_prompts_with_many_sequences_do_not_wait_for_each_others_pages(served: Live) -> None:
    """They are 1,280 sequences, and the engine has a few hundred pages."""
    found = served.post("/completion", prompt=["ab"] * 20, n=64, n_predict=3, **SAMPLING).json
    assert [one["index"] for one in found] == list(range(20 * 64))
    assert {(one["content"], one["tokens_predicted"]) for one in found} == {(found[0]["content"], 3)}


def test_the_response_says_what_it_was_made_with(served: Live) -> None:
    asked = {"prompt": PROMPT, "n_predict": 5, "temperature": 0.5, "top_k": 7, "stop": ["@@"], "ignore_eos": True}
    found = served.post("/completion", **asked, logit_bias=[[40, 0.5]], cache_prompt=False).json
    used = found["generation_settings"]
    assert (used["temperature"], used["top_k"], used["n_predict"], used["stop"]) == (0.5, 7, 5, ["@@"])
    assert used["logit_bias"] == [{"token": 40, "bias": 0.5}]
    again = served.post("/completion", **asked, logit_bias=[[40, 0.5]], seed=used["seed"]).json
    assert again["content"] == found["content"]
    times = found["timings"]
    assert (times["prompt_n"], times["predicted_n"], times["cache_n"]) == (len(PROMPT), 5, 0)
    assert times["prompt_ms"] > 0 < times["predicted_ms"]
    assert times["predicted_per_second"] == pytest.approx(5000 / times["predicted_ms"])
    assert found["has_new_line"] == ("\n" in found["content"])
    assert not found["truncated"]
    assert served.post("/completion", prompt=PROMPT, **SAMPLING).json["truncated"]
    few = served.post("/completion", **asked, response_fields=["content", "timings/prompt_n", "none/such"]).json
    assert few == {"content": few["content"], "timings/prompt_n": len(PROMPT)}
    events = served.post("/completion", **asked, stream=True, timings_per_token=True, response_fields=["stop"])
    *rest, last = [json.loads(event[6:]) for event in events.body.decode().split("\n\n") if event]
    assert last == {"stop": True}
    counts = [one["timings"]["predicted_n"] for one in rest]
    assert counts == [one["tokens_predicted"] for one in rest] == sorted(counts)
    assert sum(len(one["tokens"]) for one in rest) <= 5


def test_the_prefix_cache_may_be_left_alone(served: Live) -> None:
    prompt = "And so it was, again and again and again, for years and years to come."
    for fields, cached in (({}, False), ({}, True), ({"cache_prompt": False}, False)):
        found = served.post("/completion", prompt=prompt, n_predict=1, **fields).json
        assert bool(found["tokens_cached"]) == cached
        assert found["tokens_cached"] == found["timings"]["cache_n"]


def test_no_tokens_make_a_prompt_warm(served: Live) -> None:
    prompt = "A prompt that will be asked about, and that is longer than a page of the cache."
    first = served.post("/completion", prompt=prompt, n_predict=0).json
    assert (first["content"], first["tokens_predicted"], first["stop_type"]) == ("", 0, "limit")
    assert served.post("/completion", prompt=prompt, n_predict=1).json["tokens_cached"] > 0


def test_probabilities_after_all_samplers(served: Live) -> None:
    fields = {"prompt": PROMPT, "n_predict": 3, "n_probs": 5, "ignore_eos": True, "temperature": 0.7, "top_k": 2}
    for one in served.post("/completion", **fields, post_sampling_probs=True).json["completion_probabilities"]:
        assert len(one["top_probs"]) == 2
        assert sum(each["prob"] for each in one["top_probs"]) == pytest.approx(1, abs=1e-5)
        assert one["prob"] in [each["prob"] for each in one["top_probs"]]
        assert "logprob" not in one


def test_lines_end_a_completion(served: Live) -> None:
    def asked(text: str, **fields: Any) -> Any:
        grammar = f"root ::= {json.dumps(text)}"
        found = served.post("/completion", prompt=PROMPT, grammar=grammar, **SAMPLING, **fields).json
        whole = [served.post("/completion", prompt=PROMPT, grammar=grammar, **SAMPLING, **fields, stream=True)]
        events = [json.loads(event[6:]) for event in whole[0].body.decode().split("\n\n") if event]
        assert "".join(event["content"] for event in events) == found["content"]
        return found

    text = "a\n  b\n    c\n d\n  e"
    found = asked(text, n_indent=2)
    assert (found["content"], found["stop_type"]) == ("a\n  b\n    c\n ", "limit")
    assert found["tokens_predicted"] == len("a\n  b\n    c\n d")  # with the one that ended it
    assert asked(text, n_indent=3)["content"] == "a\n  "
    assert asked(text, n_indent=1)["content"] == asked(text)["content"] == text
    fields = {"prompt": PROMPT, "logit_bias": {"\n": 100}, **SAMPLING}
    timed = served.post("/completion", **fields, t_max_predict_ms=1).json
    assert timed["content"] == "\n" * timed["tokens_predicted"]
    assert (timed["stop_type"], timed["truncated"]) == ("limit", False)
    assert asked(text, t_max_predict_ms=10**400)["content"] == text


def test_samplers_that_are_not_listed_are_off(served: Live) -> None:
    fields = {"prompt": PROMPT, "n_predict": 12, "seed": 3, "ignore_eos": True}
    drawn = {
        "temperature": 1.7,
        "top_k": 1,
        "top_p": 0.9,
        "repeat_penalty": 1.9,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
    }
    plain = served.post("/completion", **fields, temperature=1.0).json
    unused = served.post("/completion", **fields, **drawn, samplers=[]).json
    assert unused["content"] == plain["content"]
    assert unused["generation_settings"]["dry_multiplier"] == 0
    likeliest = served.post("/completion", **fields, temperature=0).json["content"]
    for listed in (["top_k"], ["top_k", "temperature"], ["temperature", "top_k", "top_p"], ["top_n_sigma", "top_k"]):
        assert served.post("/completion", **fields, **drawn, samplers=listed).json["content"] == likeliest
    for listed in (["top_p", "temperature"], ["infill"], ["top_k", "top_k"], ["top_p", "dry"]):
        assert served.refused("/completion", **fields, **drawn, samplers=listed)["param"] == "samplers"
    idle = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    assert served.post("/completion", **fields, top_k=1, temperature=0.7, samplers=idle).json["content"] == likeliest


def test_penalties_count_what_repeat_last_n_says(served: Live) -> None:
    fields = {"prompt": PROMPT, "n_predict": 8, "logit_bias": {"O": 100}, **SAMPLING}
    assert served.post("/completion", **fields, repeat_penalty=1e4, repeat_last_n=0).json["content"] == "O" * 8
    own = served.post("/completion", **fields, repeat_penalty=1e4).json["content"]
    with_prompt = served.post("/completion", **fields, repeat_penalty=1e4, repeat_last_n=-1).json["content"]
    assert own.startswith("O")
    assert not with_prompt.startswith("O")
    (letter,) = served.engine.tokenizer.encode("O")
    sampler = hw.Sampling(temperature=0, repetition_penalty=1e4, logit_bias={letter: 100})

    async def program(engine: hw.Engine) -> str:
        async with engine.context() as context:
            return await context.fill(PROMPT).generate(sampler, max_tokens=8, stop_only=True).text()

    assert served.engine.run(program) == with_prompt


def test_bias_as_an_object_and_for_texts(served: Live) -> None:
    fields = {"prompt": PROMPT, "n_predict": 2, **SAMPLING, "return_tokens": True}
    (x,) = served.engine.tokenizer.encode("x")
    for bias in ({"x": 100}, {str(x): 100}, [["x", 60], [x, 60]]):
        assert served.post("/completion", **fields, logit_bias=bias).json["tokens"] == [x, x], bias
    assert x not in served.post("/completion", **fields, logit_bias={"x": False}).json["tokens"]


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
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": "a", "n_predict": -2}, "n_predict"),
        ({"prompt": "a", "n_predict": 1, "max_tokens": 2}, "max_tokens"),
        ({"prompt": "a", "n_cmpl": 10**6}, "n_cmpl"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aa"]}}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a", [1, True]]}, "prompt"),
        ({"prompt": "a", "lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"prompt": "a", "n_indent": -1}, "n_indent"),
        ({"prompt": "a", "t_max_predict_ms": -2}, "t_max_predict_ms"),
        ({"prompt": "a", "dynatemp_range": 0.5}, "dynatemp_range"),
        ({"prompt": "a", "min_keep": 3}, "min_keep"),
        ({"prompt": "a", "top_n_sigma": 1}, "top_n_sigma"),
        ({"prompt": "a", "grammar_lazy": True}, "grammar_lazy"),
        ({"prompt": "a", "return_progress": True}, "return_progress"),
        ({"prompt": "a", "repeat_last_n": -1, "presence_penalty": 1}, "repeat_last_n"),
        ({"prompt": "a", "n_predict": 10**9}, "prompt"),
        ({"prompt": "a", "logit_bias": [[1]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [["a", True]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [[10**9, 1]]}, "logit_bias"),
        ({"prompt": "a", "repeat_last_n": 64, "repeat_penalty": 1.2}, "repeat_last_n"),
        ({"prompt": "a", "samplers": ["infill"]}, "samplers"),
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
