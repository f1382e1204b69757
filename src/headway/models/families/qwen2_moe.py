"""Qwen2-MoE: Qwen2 with experts and a shared one behind a gate; some layers may be dense."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import BadModelFile
from headway.models.description import Description, Experts
from headway.models.families.family import Family
from headway.models.families.gguf_experts import gguf_experts
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    experts = Experts(
        count=keys.size("num_experts", 60),
        per_token=keys.size("num_experts_per_tok", 4),
        size=keys.size("moe_intermediate_size", 1408),
        normalize=keys.bool("norm_topk_prob", False),
        shared_size=keys.size("shared_expert_intermediate_size", 5632),
        dense_layers=dense_layers(keys, config.layers),
    )
    bias = keys.bool("qkv_bias", True)
    return replace(config, qkv_bias=bias, description=Description(activation=keys.activation(), experts=experts))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    size = keys.size("expert_shared_feed_forward_length")
    experts = replace(gguf_experts(keys, config, normalize=False), shared_size=size)
    return replace(config, description=Description(experts=experts))


def dense_layers(keys: Keys, layers: int) -> frozenset[int]:
    """The layers without experts."""
    step, dense = keys.size("decoder_sparse_step", 1), keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(l) is not int or not 0 <= l < layers for l in dense):
        raise BadModelFile(f"config.json: mlp_only_layers is {dense!r}; it must list layers from 0 to {layers - 1}")
    return frozenset(dense) | {l for l in range(layers) if (l + 1) % step}


FAMILY = Family(
    name="qwen2-moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    gguf="qwen2moe",
    qkv_bias=True,
    window="layers",
    kv_heads=16,
    eps=1e-6,
    experts=True,
    describe=describe,
    describe_gguf=describe_gguf,
)
