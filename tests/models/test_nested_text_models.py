"""Folders of models with images and sound: their text model has the logits that transformers computes of text alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headway as hw
from headway.models.config import from_hf
from headway.models.quantized.write import quantize_model
from support.checks import all_logits, assert_close, random_tokens
from support.hf import randomize, save_hf
from support.hf_families import DELTA, LATENT_AND_CHUNKED, LAYERS, PROPORTIONAL, SHARED, YARN, family_model

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "head_dim": 16,
}
EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
QWEN_EYES = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 32}
GROWING = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"sliding_window": 6, "query_pre_attn_scalar": 16}, {"vision_config": EYES}),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, {"vision_config": {"model_type": "pixtral", **EYES}}),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, **GROWING}},
        {"vision_config": {"model_type": "pixtral", **EYES}},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"rope_parameters": SECTIONS, "head_dim": None},
        {"vision_config": {**QWEN_EYES, "out_hidden_size": 64}, **IDS},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        {"vision_config": {**QWEN_EYES, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}, **IDS},
    ),
    "gemma4": (
        "Gemma4",
        {**LAYERS, "global_head_dim": 24, "rope_parameters": PROPORTIONAL},
        {"vision_config": None, "audio_config": None},
    ),
    "qwen3.5": (
        "Qwen3_5",
        {**DELTA, "rope_parameters": {**SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 0.25}},
        {"vision_config": {**QWEN_EYES, "out_hidden_size": 64}, **IDS},
    ),
    "qwen3.5-moe": (  # its experts are in one tensor
        "Qwen3_5Moe",
        {**DELTA, **SHARED, "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5}},
        {"vision_config": {**QWEN_EYES, "out_hidden_size": 64}, **IDS},
    ),
    "llama4": (
        "Llama4",
        {**LATENT_AND_CHUNKED["Llama4Text"]["llama4"], "pad_token_id": 0},
        {"vision_config": {**EYES, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}},
    ),
    "llava": ("Llava", {"model_type": "llama"}, {"vision_config": {"model_type": "clip_vision_model", **EYES}}),
}
QUICK = ("gemma3", "qwen2.5-vl", "qwen3.5-moe")
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
N = 23


def nested(name: str) -> Any:
    kind, text, more = CASES[name]
    settings = json.loads(json.dumps({"text_config": {**TEXT, **text}, **more}))
    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    randomize(model, 3)
    return model


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].numpy()


def renamed(folder: Path, text: str, head: str) -> None:
    """The folder with other names of the text model's tensors: what goes before them, and the head's."""
    weights = load_file(folder / "model.safetensors")
    (at,) = [n.removesuffix("embed_tokens.weight") for n in weights if n.endswith(".embed_tokens.weight")]
    new = {
        text + name.removeprefix(at)
        if name.startswith(at)
        else head
        if name.endswith("lm_head.weight")
        else name: tensor
        for name, tensor in weights.items()
        if not (at == "model." and name.startswith("model.visual."))
    }
    save_file(new, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_the_text_model_alone_is_loaded_whatever_its_tensors_are_called(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway.engine")
    model, tokens = nested(name), random_tokens(89, N)
    model.save_pretrained(tmp_path)
    expected = logits(model, tokens)
    for names in (
        None,
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ):
        if names is not None:
            renamed(tmp_path, *names)
        with hw.Engine(tmp_path, pages=8, threads=2) as engine:
            assert_close(all_logits(engine, tokens), expected)
            assert engine.info.parameters < sum(p.numel() for p in model.parameters()) or name == "gemma4"
    assert "the text model alone is loaded; what is for images and sound is left out" in caplog.text


def test_a_folder_with_the_text_models_keys_beside_the_others_is_read(tmp_path: Path) -> None:
    """As Qwen2.5-VL is published."""
    model, tokens = nested("qwen2.5-vl"), random_tokens(89, N)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    flat = {**config["text_config"], **{k: v for k, v in config.items() if k != "text_config"}}
    rope = flat.pop("rope_parameters")
    flat |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    weights = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with hw.Engine(tmp_path, pages=8, threads=1) as engine:
        assert_close(all_logits(engine, tokens), logits(model, tokens))


def test_the_text_model_of_gemma3n_is_loaded_from_names_as_published(tmp_path: Path) -> None:
    """The whole model needs a package for its eyes, so the text model's folder is made to look like it."""
    config, model = family_model("gemma3n-published")
    folder, tokens = save_hf(tmp_path, model), random_tokens(89, N)
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    weights = load_file(folder / "model.safetensors")
    inner = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in weights.items()}
    others = {"model.embed_vision.embedding.weight": torch.ones(2, 2), "model.audio_tower.norm.weight": torch.ones(2)}
    save_file(inner | others, folder / "model.safetensors", metadata={"format": "pt"})
    with hw.Engine(folder, pages=8, threads=1) as engine:
        assert_close(all_logits(engine, tokens), logits(model, tokens))


def test_a_quantized_folder_of_it_is_one_of_the_text_model(tmp_path: Path) -> None:
    model, tokens = nested("gemma3"), random_tokens(89, N)
    model.save_pretrained(tmp_path / "whole")
    quantize_model(tmp_path / "whole", "int8", tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    with hw.Engine(tmp_path / "text", pages=8, threads=1) as engine:
        found = all_logits(engine, tokens)
    assert np.corrcoef(found.ravel(), logits(model, tokens).ravel())[0, 1] > 0.98


def test_the_published_config_of_gemma3_is_read() -> None:
    """As google/gemma-3-4b-it has it: what is as in transformers is not said."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = from_hf({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text})
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.tied
    assert config.parameters == pytest.approx(3.88e9, rel=0.01)
