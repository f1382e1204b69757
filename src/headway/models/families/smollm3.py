"""SmolLM3: Llama in which every fourth layer is not rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.kernels.host.rope import Rope
from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    every = keys.size("no_rope_layer_interval", 4)
    rotated = keys.per_layer("no_rope_layers", config.layers, {1: True, 0: False})
    rotated = rotated or tuple(bool((i + 1) % every) for i in range(config.layers))
    return _described(config, rotated, keys.activation())


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return _described(config, tuple(bool((i + 1) % 4) for i in range(config.layers)))


def _described(config: ModelConfig, rotated: tuple[bool, ...], activation: str = "silu") -> ModelConfig:
    ropes = tuple(config.rope if each else Rope(0) for each in rotated)
    return replace(config, description=Description(ropes=ropes, activation=activation))


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    gguf="smollm3",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    window="layers",
    theta=2_000_000.0,
    kv_heads=4,
    eps=1e-6,
    tied=True,
    interleaved_gguf=True,
    describe=describe,
    describe_gguf=describe_gguf,
)
