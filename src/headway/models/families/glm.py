"""GLM, GLM-4's first version: half of each head rotated as neighboring pairs, gate and up in one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description
from headway.models.families import glm4
from headway.models.families.parts import stacked
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

GATE_UP = ("gate", "up")


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    return replace(config, description=Description(activation=keys.activation()))


FAMILY = replace(
    glm4.FAMILY,
    name="glm",
    architectures=("GlmForCausalLM",),
    model_types=("glm",),
    gguf="chatglm",
    describe=describe,
    describe_gguf=None,
    parts=stacked("mlp.gate_up_proj", GATE_UP),
    gguf_parts=stacked("attn_qkv", ("q", "k", "v")) | stacked("ffn_up", GATE_UP),
)
