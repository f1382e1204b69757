"""GGUF files of families that are not Llama's: the logits of the folder they were written from."""

from __future__ import annotations

from pathlib import Path

import pytest

import headway as hw
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.gguf_families import write_family
from support.hf import save_hf
from support.hf_families import family_model

QUICK = ("gemma3-pattern", "granite-moe")
SLOW = (
    *(
        "gemma",
        "gemma2-head-scale",
        "phi3",
        "phi3-partial",
        "olmo2",
        "smollm3-every-fourth",
        "granite",
        "cohere2-pattern",
    ),
    *("stablelm", "stablelm-parallel-normed", "gpt2", "gpt-neox", "gpt-neox-serial", "falcon", "falcon-new"),
    *("falcon-new-one-norm", "starcoder2", "glm4", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"),
)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_gguf_file_is_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    _, model = family_model(name, seed=3)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 40)
    path = write_family(tmp_path / "m.gguf", folder, model)
    with hw.Engine(path, pages=8, threads=2) as engine:
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))
        assert engine.info.parameters == sum(p.numel() for p in model.parameters())
        assert engine.config.tied == model.config.tie_word_embeddings
