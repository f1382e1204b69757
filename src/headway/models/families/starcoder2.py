"""StarCoder2: layer norms, biases, a feed-forward without a gate, a window on every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description
from headway.models.families.family import LAYER_NORM_GGUF, Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    activation = keys.activation(default="gelu_pytorch_tanh")
    return replace(config, description=Description(norm="layer", norm_bias=True, gated=False, activation=activation))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=Description(norm="layer", norm_bias=True, gated=False, activation="gelu_tanh"))


FAMILY = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    gguf="starcoder2",
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    biased=True,
    window="given",
    kv_heads=2,
    eps=1e-5,
    tied=True,
    keys={"rms_norm_eps": "norm_epsilon"},
    gguf_keys=LAYER_NORM_GGUF,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={"up": "mlp.c_fc.weight", "down": "mlp.c_proj.weight"},
)
