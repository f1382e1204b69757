"""Qwen3-MoE: Qwen3 with experts; some layers may be dense."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description, Experts
from headway.models.families.family import Family
from headway.models.families.gguf_experts import gguf_experts
from headway.models.families.qwen2_moe import dense_layers
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    count = keys.size("num_experts" if keys.has("num_experts") else "num_local_experts", 128)
    experts = Experts(
        count=count,
        per_token=keys.size("num_experts_per_tok", 8),
        size=keys.size("moe_intermediate_size", 768),
        normalize=keys.bool("norm_topk_prob", False),
        dense_layers=dense_layers(keys, config.layers),
    )
    return replace(config, description=Description(activation=keys.activation(), experts=experts))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=Description(experts=gguf_experts(keys, config)))


FAMILY = Family(
    name="qwen3-moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    gguf="qwen3moe",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    window="layers",
    kv_heads=4,
    eps=1e-6,
    experts=True,
    describe=describe,
    describe_gguf=describe_gguf,
)
