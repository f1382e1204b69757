"""Cohere 2 (Command R7B): attention and feed-forward side by side under one layer norm.

Three layers of four have a window; only these are rotated, neighboring dimensions as pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.kernels.host.rope import Rope
from headway.models.description import Description
from headway.models.families.family import LAYER_NORM_GGUF, Family
from headway.models.families.windows import alternating
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    windows = alternating(keys, config.layers, every=keys.size("sliding_window_pattern", 4))
    return _described(config, windows, keys.activation(), keys.positive("logit_scale", 0.0625))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    window = keys.size("attention.sliding_window")
    windows = tuple(window if (i + 1) % 4 else None for i in range(config.layers))
    return _described(config, windows, "silu", keys.positive("logit_scale"))


def _described(config: ModelConfig, windows: tuple[int | None, ...], activation: str, scale: float) -> ModelConfig:
    description = Description(
        norm="layer",
        parallel=True,
        one_norm=True,
        activation=activation,
        ropes=tuple(Rope(0) if window is None else config.rope for window in windows),
        logit_scale=scale,
    )
    return replace(config, windows=windows, description=description)


FAMILY = Family(
    name="cohere2",
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    gguf="cohere2",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    eps=1e-5,
    tied=True,
    interleaved_hf=True,
    interleaved_gguf=True,
    keys={"rms_norm_eps": "layer_norm_eps"},
    gguf_keys=LAYER_NORM_GGUF,
    describe=describe,
    describe_gguf=describe_gguf,
)
