"""Folders that `headway quantize` writes of every family, as transformers and we read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

import headway as hw
from headway.models.files.weights import open_weights
from headway.models.quantized.write import FOLDER, quantize_model
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.hf import random_hf, save_hf
from support.hf_families import family_model
from support.quantized_files import mxfp4, with_weights

# Families whose output is the embedding, or has another name in the files, first: transformers has a matrix for it.
QUICK = (("gemma", "int4"), ("gpt-neox", "fp8"), ("qwen3.5", "int8"))
DENSE = (
    *("gemma", "gemma2", "gemma3", "phi3", "phi", "olmo2", "olmo3", "smollm3", "granite", "cohere2", "stablelm"),
    *("gpt-neox", "gptj", "falcon", "falcon-new", "starcoder2", "glm4", "lfm2", "qwen3.5", "gemma3n", "gemma4"),
    *("granite-hybrid-dense", "mamba2", "granite-moe", "gpt-oss", "gemma4-experts"),
)
SLOW = [(name, to) for name in DENSE for to in FOLDER if (name, to) not in QUICK]
# transformers looks for a weight in linear layers of these, which packed ones do not have.
UNREAD = ("falcon", "falcon-new", "mamba2")
SLOW = [(name, to) for name, to in SLOW if to != "int4" or name not in UNREAD]
# What transformers does not read back: experts, a tensor each; matrices of 2 numbers in a group.
OURS = (("qwen3-moe", "int4"), ("qwen3-next", "int8"), ("deepseek-v2", "fp8"), ("llama4", "int8"), ("mamba2", "int4"))


@pytest.mark.parametrize(("name", "to"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_transformers_reads_a_folder_as_we_do(name: str, to: str, tmp_path: Path) -> None:
    _, model = family_model(name, seed=3)
    quantize_model(save_hf(tmp_path, model), to, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    tokens = random_tokens(97, 20)
    with hw.Engine(tmp_path / "out", pages=8, threads=1, dtype="float32") as engine:
        assert_close(all_logits(engine, tokens), reference_logits(theirs.eval(), tokens))


@pytest.mark.parametrize(("name", "to"), [*OURS[:2], *(pytest.param(*c, marks=pytest.mark.slow) for c in OURS[2:])])
def test_a_folder_computes_what_its_dequantized_weights_do(name: str, to: str, tmp_path: Path) -> None:
    _, model = family_model(name, seed=3)
    folder = save_hf(tmp_path, model)
    quantize_model(folder, to, tmp_path / "out")
    with open_weights(tmp_path / "out") as weights:
        floats = {name: np.array(weights.array(name)) for name in weights.names()}
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = random_tokens(97, 20)
    with hw.Engine(tmp_path / "out", pages=8, threads=1, dtype="float32") as engine:
        assert_close(all_logits(engine, tokens), reference_logits(theirs.eval(), tokens))


@pytest.mark.parametrize(("name", "kept"), [("granite-moe", 4), ("gpt-oss", 4), ("llama4", 4), ("qwen3-moe", 0)])
def test_experts_that_are_stacked_stay_as_they_are_and_are_counted(name: str, kept: int, tmp_path: Path) -> None:
    _, model = family_model(name, seed=3)
    folder = save_hf(tmp_path, model)
    result = quantize_model(folder, "int8", tmp_path / "out")
    with open_weights(folder) as before, open_weights(tmp_path / "out") as after:
        stacked = [name for name in before.names() if before.array(name).ndim == 3]
        assert result.kept == len(stacked) == kept
        assert result.kept_bytes == sum(before.nbytes(name) for name in stacked)
        assert all(np.array_equal(before.array(name), after.array(name)) for name in stacked)


def test_matrices_of_recurrent_layers_are_quantized_and_convolutions_are_not(tmp_path: Path) -> None:
    _, model = family_model("lfm2", seed=3)
    quantize_model(save_hf(tmp_path, model), "int8", tmp_path / "out")
    with open_weights(tmp_path / "out") as weights:
        kinds = {name.removeprefix("model.layers.0."): weights.stored(name) for name in weights.names()}
    assert kinds["conv.in_proj.weight"] == kinds["conv.out_proj.weight"] == "INT8"
    assert kinds["conv.conv.weight"] == "F32"
    tokens = random_tokens(97, 20)
    with hw.Engine(tmp_path / "out", pages=8, threads=1) as engine:  # as they are, activations in 8 bits too
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens), tolerance=0.15)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-inner"])
def test_transposed_matrices_are_refused(name: str, tmp_path: Path) -> None:
    _, model = family_model(name, seed=3)
    folder = save_hf(tmp_path, model)
    for to in FOLDER:
        with pytest.raises(hw.Unsupported, match=r"no linear layer that .* stored transposed .* --to Q8_0"):
            quantize_model(folder, to, tmp_path / "out")


def test_a_folder_saved_without_the_head_is_quantized(tmp_path: Path) -> None:
    _, model = random_hf("llama", 1, tie_word_embeddings=True)
    folder = save_hf(tmp_path, model)
    with open_weights(folder) as weights:
        bare = {name.removeprefix("model."): np.array(weights.array(name)) for name in weights.names()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    assert quantize_model(folder, "int8", tmp_path / "out").tensors == 14


def test_experts_in_mxfp4_do_not_become_floats(tmp_path: Path) -> None:
    _, model = family_model("gpt-oss", seed=3, hidden_size=64, intermediate_size=64)
    mxfp4(tmp_path / "folder", model)
    with pytest.raises(hw.Unsupported, match=r"is stored as MXFP4, and a folder in int8 would hold it as floats.*GGUF"):
        quantize_model(tmp_path / "folder", "int8", tmp_path / "out")


def test_experts_in_mxfp4_stay_so_in_a_gguf_file_unless_it_has_floats(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    _, model = family_model("gpt-oss", seed=3, hidden_size=64, intermediate_size=64, rope_parameters=rope)
    floats, tokens = mxfp4(tmp_path / "folder", model), random_tokens(97, 20)
    quantize_model(tmp_path / "folder", "F32", tmp_path / "f32.gguf")
    quantize_model(tmp_path / "folder", "Q8_0", tmp_path / "q8.gguf")
    quantize_model(tmp_path / "q8.gguf", "Q4_K_M", tmp_path / "q4.gguf")
    for file in ("q8.gguf", "q4.gguf"):
        with open_weights(tmp_path / "f32.gguf") as exact, open_weights(tmp_path / file) as made:
            experts = [name for name in exact.names() if name.endswith("_exps.weight")]
            assert len(experts) == 3 * 2
            for name in experts:
                assert (exact.stored(name), made.stored(name)) == ("F32", "MXFP4")
                assert np.array_equal(made.array(name), exact.array(name)), name
    with hw.Engine(tmp_path / "f32.gguf", pages=8, threads=1, dtype="float32") as engine:
        assert_close(all_logits(engine, tokens), reference_logits(with_weights(model, floats), tokens))
