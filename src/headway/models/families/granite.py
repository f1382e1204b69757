"""Granite: Llama with multipliers of embeddings, attention, residual and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def multipliers(keys: Keys) -> Description:
    """The description of a config.json's multipliers."""
    return Description(
        activation=keys.activation(),
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        attention_scale=keys.positive("attention_multiplier", 1.0),
        residual_scale=keys.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / keys.positive("logits_scaling", 1.0),
    )


def gguf_multipliers(keys: Keys) -> Description:
    """The same of GGUF metadata."""
    return Description(
        embedding_scale=keys.positive("embedding_scale", 1.0),
        attention_scale=keys.positive("attention.scale") if keys.get("attention.scale") else None,
        residual_scale=keys.positive("residual_scale", 1.0),
        logit_scale=1.0 / keys.positive("logit_scale", 1.0),
    )


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    return replace(config, description=multipliers(keys))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=gguf_multipliers(keys))


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    gguf="granite",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    eps=1e-6,
    interleaved_gguf=True,
    describe=describe,
    describe_gguf=describe_gguf,
)
