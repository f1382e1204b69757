"""`suffix`: the prompt of a model that fills in the middle, and models that cannot."""

from __future__ import annotations

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


def test_models_without_such_tokens_and_gbnf_are_refused(tmp_path: Path) -> None:
    with live(small_engine(tmp_path / "model")) as served:
        error = served.refused("/v1/completions", prompt="x", suffix="y")
        assert (error["param"], error["code"]) == ("suffix", "unsupported")
        assert served.complete("x", suffix="", max_tokens=1)["choices"]
        grammar = {"grammar": 'root ::= "a" | "b"'}
        error = served.refused("/v1/completions", prompt="x", structured_outputs=grammar)
        assert "looks like GBNF" in error["message"]
