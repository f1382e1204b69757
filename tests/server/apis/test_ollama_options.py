"""What Ollama's clients set beside the prompt: options, a suffix, and what the counts and times of responses are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.server.models import ModelSources
from support.live import Live, live
from support.many_models import Loader, many, model_folders
from support.small import small_folder

PROMPT = "Once upon a time"
NAMES = {"<|python_tag|>": "<|fim_prefix|>", "<|eom_id|>": "<|fim_suffix|>", "<|constrain|>": "<|fim_middle|>"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = small_folder(tmp_path_factory.mktemp("small") / "model")
    text = (folder / "tokenizer.json").read_text()
    for old, new in NAMES.items():
        text = text.replace(old, new)
    (folder / "tokenizer.json").write_text(text)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 40}))
    with live(hw.Engine(folder, threads=1, pages=128)) as server:
        yield server


def generated(served: Live, options: dict[str, Any], **fields: Any) -> Any:
    asked = {"model": "smollm2", "prompt": PROMPT, "raw": True, "stream": False, "options": options} | fields
    answer = served.post("/api/generate", **asked)
    assert answer.status == 200, answer.body
    return answer.json


def refused(served: Live, options: dict[str, Any], **fields: Any) -> str:
    asked = {"model": "smollm2", "prompt": PROMPT, "raw": True, "options": options} | fields
    answer = served.post("/api/generate", **asked)
    assert answer.status == 400, answer.body
    return answer.json["error"]


def test_a_seed_of_minus_one_is_any(served: Live) -> None:
    texts = {generated(served, {"seed": -1, "num_predict": 12, "temperature": 1.5})["response"] for _ in range(4)}
    assert len(texts) > 1
    same = {generated(served, {"seed": 7, "num_predict": 12, "temperature": 1.5})["response"] for _ in range(2)}
    assert len(same) == 1


def test_as_many_tokens_as_fit(served: Live) -> None:
    for most in (-1, -2):
        found = generated(served, {"num_predict": most, "temperature": 0})
        assert found["done_reason"] == "stop" or found["eval_count"] == 256 - len(PROMPT)
    assert "num_predict is -3" in refused(served, {"num_predict": -3})


def test_repeat_last_n(served: Live) -> None:
    asked = {"num_predict": 8, "temperature": 0}
    free = generated(served, asked)["response"]
    assert generated(served, asked | {"repeat_last_n": 64})["response"] == free
    assert generated(served, asked | {"repeat_last_n": 0, "repeat_penalty": 9.0})["response"] == free
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "repetition_penalty": 1e4}
    own = served.complete(**body)["choices"][0]["text"]
    assert generated(served, asked | {"repeat_penalty": 1e4})["response"] == own

    async def program(engine: hw.Engine) -> str:
        async with engine.context() as context:
            sampler = hw.Sampling(temperature=0, repetition_penalty=1e4)
            return await context.fill("tttt").generate(sampler, max_tokens=8).text()

    found = generated(served, asked | {"repeat_penalty": 1e4, "repeat_last_n": -1}, prompt="tttt")["response"]
    assert found == served.engine.run(program)
    assert "repeat_last_n is 64" in refused(served, {"repeat_last_n": 64, "repeat_penalty": 1.1})
    assert "presence" in refused(served, {"repeat_last_n": -1, "presence_penalty": 1.0})


def test_a_suffix_is_infilled(served: Live) -> None:
    asked = {"num_predict": 6, "temperature": 0}
    found = generated(served, asked, prompt="def f(", suffix=") -> int:", raw=False)
    (same,) = served.complete("def f(", suffix=") -> int:", max_tokens=6, temperature=0)["choices"]
    assert found["response"] == same["text"]
    assert found["prompt_eval_count"] == len("def f() -> int:") + 3
    assert "insert" in served.post("/api/show", model="smollm2").json["capabilities"]
    assert "suffix leaves out" in refused(served, asked, suffix="x", system="y", raw=False)


def test_what_is_not_here_is_refused_with_the_way_out(served: Live) -> None:
    assert "raw" in refused(served, {}, template="{{ .Prompt }}")
    assert "/api/chat" in refused(served, {}, context=[1, 2])
    assert "take text" in refused(served, {}, images=["aGk="])
    assert "tfs_z" in refused(served, {"tfs_z": 0.5})
    assert "num_ctx" in refused(served, {"num_ctx": 10**6})
    whole = generated(served, {"num_predict": 1, "num_keep": 4, "draft_num_predict": 2}, truncate=True, shift=False)
    assert (whole["eval_count"], whole["done_reason"]) == (1, "length")
    assert "context length" in refused(served, {}, prompt="x" * 300, truncate=True)
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        assert "keep_alive" in served.post(path, model="e", **{field: "x"}, keep_alive="soon").json["error"]


def test_show_has_the_models_own_parameters(served: Live) -> None:
    shown = served.post("/api/show", model="smollm2").json
    assert shown["parameters"].splitlines() == ["temperature 0.6", "top_k 40"]
    assert "tokenizer.ggml.tokens" not in shown["model_info"]
    info = served.post("/api/show", model="smollm2", verbose=True).json["model_info"]
    assert len(info["tokenizer.ggml.tokens"]) == served.engine.tokenizer.vocab_size
    assert "<|fim_prefix|>" in info["tokenizer.ggml.tokens"]


def test_times_tell_loading_from_computing(tmp_path: Path) -> None:
    loader = Loader()
    sources = [loader.source(path) for path in model_folders(tmp_path, "ada", "bob").values()]
    with many(ModelSources(sources, budget=1 << 30), loader) as served:
        first, second = (generated(served, {"num_predict": 3}, model="ada", prompt="xy") for _ in range(2))
    assert first["load_duration"] > second["load_duration"] >= 0
    for found in (first, second):
        parts = [found[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
        assert min(parts[1:]) > 0
        assert sum(parts) <= found["total_duration"]
