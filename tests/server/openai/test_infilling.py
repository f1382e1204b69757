"""`suffix`: the prompt of a model that fills in the middle, and models that cannot."""

from __future__ import annotations

import json
from pathlib import Path

import headway as hw
from support.live import live
from support.small import small_engine, small_folder

NAMES = {"<|python_tag|>": "<|fim_prefix|>", "<|eom_id|>": "<|fim_suffix|>", "<|constrain|>": "<|fim_middle|>"}


def test_a_suffix_makes_the_prompt_that_models_for_code_know(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    text = (folder / "tokenizer.json").read_text()
    for old, new in NAMES.items():
        text = text.replace(old, new)
    (folder / "tokenizer.json").write_text(text)
    with live(hw.Engine(folder, threads=1, pages=64)) as served:
        fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        (filled,) = served.complete("def f(", suffix=") -> int:", **fields)["choices"]
        written = "<|fim_prefix|>def f(<|fim_suffix|>) -> int:<|fim_middle|>"
        ids = served.engine.tokenizer.encode(written, special=True)
        assert filled["prompt_token_ids"] == ids
        (same,) = served.complete(ids, **fields)["choices"]
        assert filled["token_ids"] == same["token_ids"]
        hostile = served.complete("<|fim_middle|>", suffix="<|fim_prefix|>", **fields)["choices"][0]["prompt_token_ids"]
        assert len(hostile) == 3 + len("<|fim_middle|><|fim_prefix|>")  # names in texts are plain text
        assert "echo" in served.refused("/v1/completions", prompt="x", suffix="y", echo=True)["message"]
        assert "texts" in served.refused("/v1/completions", prompt=[1, 2], suffix="y")["message"]


def test_infill_has_the_prompt_and_the_response_of_llama_server(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    text = (folder / "tokenizer.json").read_text()
    for old, new in NAMES.items():
        text = text.replace(old, new)
    (folder / "tokenizer.json").write_text(text)
    with live(hw.Engine(folder, threads=1, pages=64)) as served:
        around = {"input_prefix": "def f(", "input_suffix": ")", "prompt": "a"}
        fields = {"temperature": 0, "ignore_eos": True}
        found = served.post("/infill", **around, **fields, n_predict=6, return_tokens=True).json
        ids = served.engine.tokenizer.encode("<|fim_prefix|>def f(<|fim_suffix|>)<|fim_middle|>a", special=True)
        (same,) = served.complete(ids, max_tokens=6, return_token_ids=True, **fields)["choices"]
        assert (found["content"], found["tokens"]) == (same["text"], same["token_ids"])
        assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 6)
        assert found["tokens_evaluated"] == len(ids)

        events = served.post("/infill", **around, **fields, n_predict=6, stream=True).body.decode().split("\n\n")
        read = [json.loads(event.removeprefix("data: ")) for event in events if event]
        assert "".join(event["content"] for event in read) == found["content"]
        assert [event["stop"] for event in read] == [False] * (len(read) - 1) + [True]

        word = found["content"][1:3]
        stopped = served.post("/infill", **around, **fields, n_predict=6, stop=[word]).json
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
        follows = served.post("/infill", **around, grammar='root ::= "x" "y"').json
        assert (follows["content"], follows["stop_type"]) == ("xy", "eos")

        extra = [{"filename": "b.py", "text": "x = 1"}, {"text": "y"}]
        longer = served.post("/infill", **around, input_extra=extra, n_predict=1).json["tokens_evaluated"]
        assert longer == len(ids) + len("\n\n--- snippet ---\n\n") * 2 + len("x = 1") + len("y")
        assert served.post("/infill", **around, n_predict=0).json["tokens_evaluated"] == len(ids)
        lines = served.post("/infill", **around, grammar='root ::= "x\\ny"', n_indent=1, response_fields=["content"])
        assert lines.json == {"content": "x\n"}
        assert served.refused("/infill", **around, n_predict=10**6)["param"] == "input_prefix"
        assert served.refused("/infill", **around, samplers=["infill"])["param"] == "samplers"


def test_models_without_such_tokens_refuse(tmp_path: Path) -> None:
    with live(small_engine(tmp_path / "model")) as served:
        error = served.refused("/v1/completions", prompt="x", suffix="y")
        assert (error["param"], error["code"]) == ("suffix", "unsupported")
        error = served.refused("/infill", input_prefix="x", input_suffix="y")
        assert error["code"] == "unsupported"
        assert "fim_prefix" in error["message"]
        assert served.complete("x", suffix="", max_tokens=1)["choices"]
