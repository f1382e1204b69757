"""StableLM: layer norms, a quarter of each head rotated, perhaps parallel, perhaps normed heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description
from headway.models.families.family import LAYER_NORM_GGUF, Each, Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    parallel = keys.bool("use_parallel_residual", False)
    normed = keys.bool("qk_layernorm", False)
    return _described(config, keys.activation(), parallel, normed)


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    parallel = "blk.0.ffn_norm.weight" not in tensors
    keys.get("use_parallel_residual")  # files without a second norm are parallel, whatever they say
    return _described(config, "silu", parallel, "blk.0.attn_q_norm.weight" in tensors)


def _described(config: ModelConfig, activation: str, parallel: bool, normed: bool) -> ModelConfig:
    description = Description(
        norm="layer", norm_bias=True, activation=activation, parallel=parallel, one_norm=parallel, qk_norm="each"
    )
    return replace(config, qk_norm=normed, description=description)


FAMILY = Family(
    name="stablelm",
    architectures=("StableLmForCausalLM",),
    model_types=("stablelm",),
    gguf="stablelm",
    qkv_bias="use_qkv_bias",
    kv_heads=32,
    partial=0.25,
    eps=1e-5,
    keys={"rms_norm_eps": "layer_norm_eps"},
    gguf_keys=LAYER_NORM_GGUF,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "q_norm": Each("self_attn.q_layernorm.norms.{}.weight"),
        "k_norm": Each("self_attn.k_layernorm.norms.{}.weight"),
    },
)
