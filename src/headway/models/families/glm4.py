"""GLM-4: norms before and after, half of each head rotated as neighboring pairs, gate and up in one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.families.parts import stacked
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    return replace(config, description=Description(norm_place="both", activation=keys.activation()))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=Description(norm_place="both"))


FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    model_types=("glm4",),
    gguf="glm4",
    qkv_bias="attention_bias",
    biased=True,
    kv_heads=2,
    head_dim=128,
    partial=0.5,
    eps=1.5625e-7,
    interleaved_hf=True,
    interleaved_gguf=True,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "post_attention_norm": "post_self_attn_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "post_mlp_norm": "post_mlp_layernorm.weight",
        **stacked("mlp.gate_up_proj", ("gate", "up")),
    },
    gguf_parts=stacked("ffn_up", ("gate", "up")),
)
