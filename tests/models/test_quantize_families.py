"""Folders that `headway quantize` writes of every family, as transformers and we read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import headway as hw
from headway.models.quantized.write import FOLDER, quantize_model
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.hf import save_hf
from support.hf_families import family_model

# Families whose output is the embedding, or has another name in the files, first: transformers has a matrix for it.
QUICK = (("gemma", "int4"), ("gpt-neox", "fp8"), ("qwen3.5", "int8"))
DENSE = (
    *("gemma", "gemma2", "gemma3", "phi3", "phi", "olmo2", "olmo3", "smollm3", "granite", "cohere2", "stablelm"),
    *("gpt-neox", "gptj", "falcon", "falcon-new", "starcoder2", "glm4", "lfm2", "qwen3.5", "gemma3n", "gemma4"),
    "granite-hybrid-dense",
)
SLOW = [(name, to) for name in DENSE for to in FOLDER if (name, to) not in QUICK]
# transformers initializes a weight of Falcon's own linear layers, which packed ones do not have.
SLOW = [case for case in SLOW if case not in (("falcon", "int4"), ("falcon-new", "int4"))]


@pytest.mark.parametrize(("name", "to"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_transformers_reads_a_folder_as_we_do(name: str, to: str, tmp_path: Path) -> None:
    _, model = family_model(name, seed=3)
    quantize_model(save_hf(tmp_path, model), to, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    tokens = random_tokens(97, 20)
    with hw.Engine(tmp_path / "out", pages=8, threads=1, dtype="float32") as engine:
        assert_close(all_logits(engine, tokens), reference_logits(theirs.eval(), tokens))
