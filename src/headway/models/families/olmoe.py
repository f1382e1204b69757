"""OLMoE: experts, with queries and keys normed over all their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description, Experts
from headway.models.families.family import Family
from headway.models.families.gguf_experts import gguf_experts
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    experts = Experts(
        count=keys.size("num_experts", 64),
        per_token=keys.size("num_experts_per_tok", 8),
        size=config.intermediate_size,
        normalize=keys.bool("norm_topk_prob", False),
    )
    return _described(config, experts, keys.activation(), keys.cap("clip_qkv"))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    clip = keys.cap("attention.clamp_kqv") if keys.get("attention.clamp_kqv") else None
    return _described(config, gguf_experts(keys, config, normalize=False), "silu", clip)


def _described(config: ModelConfig, experts: Experts, activation: str, clip: float | None) -> ModelConfig:
    description = Description(activation=activation, qk_norm="row", qkv_clip=clip, experts=experts)
    return replace(config, description=description)


FAMILY = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    model_types=("olmoe",),
    gguf="olmoe",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    eps=1e-5,
    experts=True,
    describe=describe,
    describe_gguf=describe_gguf,
)
