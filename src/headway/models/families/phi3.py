"""Phi-3 and Phi-4: Llama with q, k and v in one matrix, gate and up in another, and perhaps part of a head rotated."""

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
    return replace(config, description=Description(activation=keys.activation()))


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    gguf="phi3",
    window="given",
    eps=1e-5,
    partial=1.0,
    defaults={"original_max_position_embeddings": 4096},
    describe=describe,
    parts=stacked("self_attn.qkv_proj", ("q", "k", "v")) | stacked("mlp.gate_up_proj", ("gate", "up")),
    gguf_parts=stacked("attn_qkv", ("q", "k", "v")) | stacked("ffn_up", ("gate", "up")),
)
