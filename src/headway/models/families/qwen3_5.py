"""Qwen3.5's text models: gated delta nets and gated attention, dense or with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.families.family import Family
from headway.models.families.qwen3_next import DELTA_PARTS, GGUF_DELTA_PARTS, delta_description, gguf_delta_description
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    return replace(config, description=delta_description(keys, config.layers, None))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return replace(config, description=gguf_delta_description(keys, config.layers, None, cycled=True))


FAMILY = Family(
    name="qwen3.5",
    architectures=("Qwen3_5ForCausalLM",),
    model_types=("qwen3_5_text",),
    outer={"Qwen3_5ForConditionalGeneration": "qwen3_5_text"},
    gguf="qwen35",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_dim=256,
    kv_heads=4,
    eps=1e-6,
    partial=0.25,
    cycled_gguf=True,
    describe=describe,
    describe_gguf=describe_gguf,
    gguf_parts={**GGUF_DELTA_PARTS, "mix_beta": "ssm_beta.weight", "mix_step": "ssm_alpha.weight"},
    parts={
        "mix_qkv": "linear_attn.in_proj_qkv.weight",
        "mix_gate": "linear_attn.in_proj_z.weight",
        "mix_beta": "linear_attn.in_proj_b.weight",
        "mix_step": "linear_attn.in_proj_a.weight",
        **DELTA_PARTS,
    },
    ignored=r"mtp\..*",
)
