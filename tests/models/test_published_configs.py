"""Configs as well-known models are published: what is read from them is what transformers reads.

Nothing of the models is built but their shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headway.kernels.host.attention import ChunkWindow, Window
from headway.kernels.host.rope import Rope, frequencies
from headway.models.config import ModelConfig, read_config

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "support/published.json").read_text())
RECURRENT = ("linear_attention", "conv", "mamba")
BIASED_ROUTERS = ("DeepSeek-V3",)  # whose corrections are no parameters for transformers


EVERYWHERE = ("mistral", "mixtral", "phi3", "starcoder2")  # models whose window, if there is one, is in every layer
VISION = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}  # text models that have no class for text alone


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_means_what_transformers_takes_it_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    ours, outer = read_config(tmp_path), outer_config(name)
    theirs = outer.get_text_config()
    model = shape_of(theirs)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == ours.layers)
    parameters = sum(p.numel() for p in model.parameters())
    if name in BIASED_ROUTERS:
        parameters += sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    assert ours.parameters == parameters
    assert ours.tied == getattr(theirs, "tie_word_embeddings", outer.tie_word_embeddings)
    assert ours.max_positions == positions(theirs, ours)
    assert ours.windows == tuple(window(theirs, layer) for layer in range(ours.layers))
    assert ours.recurrent_layers == tuple(l for l in range(ours.layers) if kind(theirs, l) in RECURRENT)
    for place, layer in enumerate(layers):
        if (attention := attention_of(layer)) is not None:
            assert scale_of(attention) == pytest.approx(ours.attention_scale), place
    assert_ropes(ours, theirs, model)
    assert_scales(ours, theirs)


def assert_scales(ours: ModelConfig, theirs: Any) -> None:
    """What embeddings, residuals and logits are multiplied with, and soft caps."""
    d, gemma = ours.description, theirs.model_type.startswith("gemma")
    embedding = theirs.hidden_size**0.5 if gemma else getattr(theirs, "embedding_multiplier", 1.0)
    assert d.embedding_scale == pytest.approx(embedding)
    assert d.residual_scale == getattr(theirs, "residual_multiplier", 1.0)
    assert d.logit_scale == pytest.approx(getattr(theirs, "logit_scale", 1.0) / getattr(theirs, "logits_scaling", 1.0))
    assert d.logit_cap == getattr(theirs, "final_logit_softcapping", None)
    assert d.attention_cap == getattr(theirs, "attn_logit_softcapping", None)


def outer_config(name: str) -> Any:
    """What transformers reads; weights are taken for floats."""
    data = json.loads(
        json.dumps({key: value for key, value in PUBLISHED[name].items() if key != "quantization_config"})
    )
    if data["model_type"] == "mistral" and "layer_types" in data:  # as AutoConfig has it
        data["model_type"] = "ministral"
    return CONFIG_MAPPING[data["model_type"]].from_dict(data)


def shape_of(config: Any) -> Any:
    """The model of transformers without memory for its weights."""
    if config.model_type in VISION:
        values = config.to_dict() | {"model_type": VISION[config.model_type]}
        config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    config.architectures, config._attn_implementation = None, "eager"
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def attention_of(layer: Any) -> Any:
    names = ("self_attn", "attn", "attention", "self_attention")
    return next((getattr(layer, name) for name in names if getattr(layer, name, None) is not None), None)


def scale_of(attention: Any) -> float:
    if hasattr(attention, "inv_norm_factor"):
        return attention.inv_norm_factor
    return attention.scaling if hasattr(attention, "scaling") else 1.0 / float(attention.scale_attn)


def kind(theirs: Any, layer: int) -> str:
    kinds = getattr(theirs, "layer_types", None) or getattr(theirs, "layers_block_type", None)
    return kinds[layer] if kinds else "linear_attention" if theirs.model_type == "mamba2" else "full_attention"


def window(theirs: Any, layer: int) -> Window:
    match kind(theirs, layer):
        case "sliding_attention":
            return theirs.sliding_window
        case "chunked_attention":
            return ChunkWindow(theirs.attention_chunk_size)
    listed = getattr(theirs, "layer_types", None)
    return theirs.sliding_window if not listed and theirs.model_type in EVERYWHERE else None


def positions(theirs: Any, ours: ModelConfig) -> int:
    """Those of longrope's short factors, and those where queries do not grow."""
    most = getattr(theirs, "max_position_embeddings", None)
    rope = getattr(theirs, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" or "llama_4_scaling_beta" in rope:
        return min(most, rope["original_max_position_embeddings"])
    return ours.max_positions if most is None else most


def assert_ropes(ours: ModelConfig, theirs: Any, model: Any) -> None:
    """Frequencies, and the factor on cos and sin, of every layer that is rotated."""
    modules = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    if not modules:
        return
    rotary = type(modules[0])(theirs)
    for layer in range(ours.layers):
        rope = (ours.description.ropes or (ours.rope,) * ours.layers)[layer]
        if layer in ours.recurrent_layers:
            continue
        own = f"{kind(theirs, layer)}_" if hasattr(rotary, f"{kind(theirs, layer)}_inv_freq") else ""
        if not is_rotated(theirs, layer):
            assert rope == Rope(0)
            continue
        np.testing.assert_allclose(frequencies(rope), getattr(rotary, f"{own}inv_freq").numpy(), 1e-6)
        assert rope.scale == pytest.approx(getattr(rotary, f"{own}attention_scaling"))


def is_rotated(theirs: Any, layer: int) -> bool:
    if theirs.model_type == "cohere2":
        return kind(theirs, layer) == "sliding_attention"
    if theirs.model_type == "granitemoehybrid":
        return theirs.position_embedding_type == "rope"
    listed = getattr(theirs, "no_rope_layers", None)
    return bool(listed[layer]) if listed else True
