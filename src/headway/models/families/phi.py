"""Phi 1, 1.5 and 2: attention and feed-forward side by side under one layer norm, biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import Unsupported
from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    if keys.bool("qk_layernorm", False):
        raise Unsupported("config.json: qk_layernorm is true; Phi with normed queries and keys is not supported")
    description = Description(
        norm="layer",
        norm_bias=True,
        parallel=True,
        one_norm=True,
        gated=False,
        activation=keys.activation(default="gelu_new"),
        head_bias=True,
    )
    return replace(config, description=description)


FAMILY = Family(
    name="phi",
    architectures=("PhiForCausalLM",),
    model_types=("phi",),
    gguf=None,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    partial=0.5,
    eps=1e-5,
    keys={"rms_norm_eps": "layer_norm_eps"},
    describe=describe,
    parts={
        "final_norm": "model.final_layernorm.weight",
        "o": "self_attn.dense.weight",
        "up": "mlp.fc1.weight",
        "down": "mlp.fc2.weight",
    },
)
