"""Granite MoE: Granite with experts, whose gates and ups are in one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Experts
from headway.models.families.family import Family
from headway.models.families.gguf_experts import gguf_experts
from headway.models.families.granite import gguf_multipliers, multipliers
from headway.models.families.parts import expert_parameters, stacked_experts
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    count, each = keys.size("num_local_experts", 8), keys.size("num_experts_per_tok", 2)
    experts = Experts(count=count, per_token=each, size=config.intermediate_size)
    return replace(config, description=replace(multipliers(keys), experts=experts))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=replace(gguf_multipliers(keys), experts=gguf_experts(keys, config)))


FAMILY = Family(
    name="granite-moe",
    architectures=("GraniteMoeForCausalLM",),
    model_types=("granitemoe",),
    gguf="granitemoe",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    eps=1e-6,
    interleaved_gguf=True,
    experts=True,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "router": "block_sparse_moe.router.layer.weight",
        **stacked_experts("block_sparse_moe.input_linear.weight"),
        "expert_down": "block_sparse_moe.output_linear.weight",
    },
    modules={"router": "block_sparse_moe.router", **expert_parameters("block_sparse_moe.experts")},
)
