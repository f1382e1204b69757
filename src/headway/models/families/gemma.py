"""Gemma: embeddings scaled by the root of their size, norm weights counted from 1, gelu."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description, NormKind
from headway.models.families.family import Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    activation = keys.activation(default="gelu_pytorch_tanh")
    if activation == "gelu":  # it stands for its approximation here, as in transformers
        activation = "gelu_tanh"
    return replace(config, description=_description(config, "rms+1", activation))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=_description(config, "rms"))  # the file's norms have the 1


def _description(config: ModelConfig, norm: NormKind, activation: str = "gelu_tanh") -> Description:
    return Description(norm=norm, activation=activation, embedding_scale=config.hidden_size**0.5)


FAMILY = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    model_types=("gemma",),
    gguf="gemma",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    head_dim=256,
    kv_heads=16,
    eps=1e-6,
    tied=True,
    describe=describe,
    describe_gguf=describe_gguf,
)
