"""From files to a decoder: GGUF files as llama.cpp's converter lays them out, and weights that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import headway as hw
from headway.models.weights.load_tensors import load_model
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.gguf_files import ARCHS, round_weights, write_gguf
from support.hf import VARIANTS, random_hf, save_hf

WIDE = {"hidden_size": 64, "intermediate_size": 96}  # rows that blocks of 32 divide


def assert_same_model(path: Path, model: PreTrainedModel, dtype: str = "auto") -> hw.Engine:
    tokens = random_tokens(model.config.vocab_size, 40)
    with hw.Engine(path, pages=8, threads=2, dtype=dtype) as engine:
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))
    return engine


# -- GGUF ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("number", range(2))
def test_a_gguf_file_is_the_model_it_was_written_from(tmp_path: Path, family: str, number: int) -> None:
    plain = [v for v in VARIANTS[family] if "rope_parameters" not in v and not v.get("use_sliding_window")]
    _, model = random_hf(family, 3, **plain[number])
    engine = assert_same_model(write_gguf(tmp_path / "m.gguf", model), model)
    assert engine.config.tied == model.config.tie_word_embeddings
    assert engine.info.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_a_quantized_file_is_the_model_with_the_rounded_weights(tmp_path: Path, family: str, kind: str) -> None:
    _, model = random_hf(family, 4, **WIDE, head_dim=16)
    exact = reference_logits(model, random_tokens(97, 40))
    path = write_gguf(tmp_path / "m.gguf", model, kind=kind)
    round_weights(model, kind)
    assert np.abs(reference_logits(model, random_tokens(97, 40)) - exact).max() > 1e-3
    assert_same_model(path, model, dtype="float32" if kind.startswith("Q") else "auto")


def test_a_tied_model_has_no_output_weight_in_its_file(tmp_path: Path) -> None:
    _, model = random_hf("llama", 5, tie_word_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", model)
    assert "output.weight" not in {t.name for t in gguf.GGUFReader(path).tensors}
    assert assert_same_model(path, model).config.tied


def test_llama3_frequencies_come_as_divisors_in_the_file(tmp_path: Path) -> None:
    _, model = random_hf("llama", 6, **next(v for v in VARIANTS["llama"] if v["name"] == "llama3-rope"))
    dim = model.config.head_dim
    plain = 1.0 / model.config.rope_parameters["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)  # type: ignore[union-attr]
    assert divisors.min() == pytest.approx(1.0)
    assert divisors.max() == pytest.approx(8.0)
    assert_same_model(write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors}), model)


@pytest.mark.parametrize("name", ["llama-linear-headdim10", "llama-yarn"])
def test_rope_scaling_comes_from_metadata(tmp_path: Path, name: str) -> None:
    _, model = random_hf("llama", 7, **next(v for v in VARIANTS["llama"] if v["name"] == name))
    rope = model.config.rope_parameters

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(model.config.head_dim)
        writer.add_value_length(model.config.head_dim)
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(32.0)
            writer.add_rope_scaling_yarn_beta_slow(1.0)

    assert_same_model(write_gguf(tmp_path / "m.gguf", model, metadata=metadata), model)


def test_a_window_in_metadata_binds_every_layer(tmp_path: Path) -> None:
    _, windowed = random_hf("mistral", 8, sliding_window=5)
    _, model = random_hf("llama", 8)
    model.load_state_dict(windowed.state_dict())
    path = write_gguf(tmp_path / "m.gguf", model, metadata=lambda w: w.add_sliding_window(5))
    assert_same_model(path, windowed)


def test_frequencies_of_the_wrong_number_are_refused(tmp_path: Path) -> None:
    _, model = random_hf("llama", 9)
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": np.ones(5, np.float32)})
    with pytest.raises(hw.BadModelFile, match=r"'rope_freqs\.weight' has shape \[5\].*needs \[8\]"):
        hw.Engine(path)


def test_a_gguf_file_with_a_weight_too_many_or_too_few_is_refused_by_name(tmp_path: Path) -> None:
    _, model = random_hf("qwen2", 9)
    path = write_gguf(tmp_path / "m.gguf", model, extra={"blk.7.attn_q.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(hw.BadModelFile, match=r"1 weights do not belong.*'blk\.7\.attn_q\.weight'"):
        hw.Engine(path)
    path = write_gguf(tmp_path / "n.gguf", model, metadata=lambda w: w.add_uint32("qwen2.block_count", 3))
    with pytest.raises(hw.BadModelFile, match=r"'blk\.2\..*' is missing"):
        hw.Engine(path)


def test_a_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    _, model = random_hf("llama", 10)
    whole = write_gguf(tmp_path / "m.gguf", model).read_bytes()
    short = tmp_path / "short.gguf"
    for size in (0, 3, 20, 200, len(whole) // 2, len(whole) - 1):
        short.write_bytes(whole[:size])
        with pytest.raises(hw.BadModelFile, match=r"short\.gguf"):
            hw.Engine(short)


# -- Hugging Face folders ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_hf(tmp_path, random_hf("qwen3", 11, head_dim=16)[1])


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_missing_or_misshapen_weight_is_named(folder: Path, name: str) -> None:
    shape = list(load_file(folder / "model.safetensors")[name].shape)
    change(folder, lambda w: w.update({name: torch.zeros(3, 5)}))
    with pytest.raises(hw.BadModelFile) as error:
        hw.Engine(folder)
    assert f"{name!r} has shape [3, 5]; this config needs {shape}" in str(error.value)
    change(folder, lambda w: w.pop(name))
    with pytest.raises(hw.BadModelFile) as error:
        hw.Engine(folder)
    assert f"{name!r} is missing; this config needs it with shape {shape}" in str(error.value)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"]
)
def test_a_weight_that_the_config_has_no_place_for_is_named(folder: Path, name: str) -> None:
    change(folder, lambda w: w.update({name: torch.zeros(4)}))
    with pytest.raises(hw.BadModelFile) as error:
        hw.Engine(folder)
    assert repr(name) in str(error.value)


def test_a_stored_head_of_a_tied_model_and_old_rotary_tables_are_harmless(tmp_path: Path) -> None:
    _, model = random_hf("llama", 12, tie_word_embeddings=True)
    folder = save_hf(tmp_path, model)
    surplus = {
        "lm_head.weight": model.get_input_embeddings().weight.detach().clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    change(folder, lambda w: w.update(surplus))
    assert_same_model(folder, model)


def test_a_config_of_another_size_names_the_first_weight_that_does_not_fit(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 98}))
    with pytest.raises(hw.BadModelFile, match=r"'model\.embed_tokens\.weight' has shape \[97, 64\].*\[98, 64\]"):
        hw.Engine(folder)


def test_a_truncated_or_missing_weight_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(hw.BadModelFile, match=r"model\.safetensors"):
            hw.Engine(folder)
    file.unlink()
    with pytest.raises(hw.HeadwayError, match="safetensors"):
        hw.Engine(folder)


def test_a_missing_model_is_refused_with_what_was_tried(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", str(tmp_path / "nothing.gguf")):
        with pytest.raises(hw.ModelNotFound, match="nothing"):
            hw.Engine(path)


def test_nothing_is_left_behind_when_loading_fails(folder: Path) -> None:
    import threading

    change(folder, lambda w: w.pop("model.norm.weight"))
    threads = set(threading.enumerate())  # those of earlier tests may end meanwhile
    for _ in range(3):
        with pytest.raises(hw.BadModelFile):
            hw.Engine(folder)
    assert set(threading.enumerate()) <= threads
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_progress_counts_layers(folder: Path) -> None:
    seen: list[Any] = []
    load_model(folder, dtype=torch.float32, device=torch.device("cpu"), progress=lambda i, n: seen.append((i, n)))
    assert seen == [(1, 2), (2, 2)]
