"""Phi 1, 1.5 and 2: attention and feed-forward side by side under one layer norm, biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import Unsupported
from headway.models.description import Description
from headway.models.families.family import LAYER_NORM_GGUF, Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


DESCRIPTION = Description(
    norm="layer", norm_bias=True, parallel=True, one_norm=True, gated=False, activation="gelu_tanh", head_bias=True
)


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    if keys.bool("qk_layernorm", False):
        raise Unsupported("config.json: qk_layernorm is true; Phi with normed queries and keys is not supported")
    return replace(config, description=replace(DESCRIPTION, activation=keys.activation(default="gelu_new")))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=DESCRIPTION)


FAMILY = Family(
    name="phi",
    architectures=("PhiForCausalLM",),
    model_types=("phi",),
    gguf="phi2",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    partial=0.5,
    eps=1e-5,
    keys={"rms_norm_eps": "layer_norm_eps"},
    gguf_keys=LAYER_NORM_GGUF,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "final_norm": "model.final_layernorm.weight",
        "o": "self_attn.dense.weight",
        "up": "mlp.fc1.weight",
        "down": "mlp.fc2.weight",
    },
)
