"""Qwen3.5's text models with experts, and a shared one behind a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Experts
from headway.models.families import qwen3_5
from headway.models.families.gguf_experts import gguf_experts
from headway.models.families.qwen3_next import delta_description, gguf_delta_description
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    experts = Experts(
        count=keys.size("num_experts", 256),
        per_token=keys.size("num_experts_per_tok", 8),
        size=keys.size("moe_intermediate_size", 512),
        shared_size=keys.size("shared_expert_intermediate_size", 512),
    )
    return replace(config, description=delta_description(keys, config.layers, experts))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    size = keys.size("expert_shared_feed_forward_length")
    experts = replace(gguf_experts(keys, config), shared_size=size)
    return replace(config, description=gguf_delta_description(keys, config.layers, experts, cycled=True))


FAMILY = replace(
    qwen3_5.FAMILY,
    name="qwen3.5-moe",
    architectures=("Qwen3_5MoeForCausalLM",),
    model_types=("qwen3_5_moe_text",),
    outer={"Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text"},
    kv_heads=2,
    inner=1,  # there is no dense feed-forward
    experts=True,
    gguf="qwen35moe",
    gguf_keys={"feed_forward_length": "expert_feed_forward_length"},
    cycled_gguf=True,
    describe=describe,
    describe_gguf=describe_gguf,
)
