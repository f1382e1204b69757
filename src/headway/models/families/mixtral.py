"""Mixtral: Mistral with eight experts, of which two are chosen. Its GGUF files call themselves llama."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description, Experts
from headway.models.families.family import Each, Family
from headway.models.families.gguf_experts import gguf_experts
from headway.models.families.parts import expert_parameters
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    count, each = keys.size("num_local_experts", 8), keys.size("num_experts_per_tok", 2)
    experts = Experts(count=count, per_token=each, size=config.intermediate_size)
    return replace(config, description=Description(activation=keys.activation(), experts=experts))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=Description(experts=gguf_experts(keys, config)))


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    gguf="llama",
    window="given",
    kv_heads=8,
    theta=1_000_000.0,
    eps=1e-5,
    interleaved_gguf=True,
    experts=True,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "router": "block_sparse_moe.gate.weight",
        "expert_gate": Each("block_sparse_moe.experts.{}.w1.weight"),
        "expert_up": Each("block_sparse_moe.experts.{}.w3.weight"),
        "expert_down": Each("block_sparse_moe.experts.{}.w2.weight"),
    },
    modules={"router": "mlp.gate", **expert_parameters("mlp.experts")},
)
