"""Gemma 2: norms before and after, soft caps of scores and logits, a window on every second layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.families.windows import alternating
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    description = Description(
        norm="rms+1",
        norm_place="both",
        activation=keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=config.hidden_size**0.5,
        attention_scale=keys.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_cap=keys.cap("attn_logit_softcapping") if keys.has("attn_logit_softcapping") else 50.0,
        logit_cap=keys.cap("final_logit_softcapping") if keys.has("final_logit_softcapping") else 30.0,
    )
    return replace(config, windows=alternating(keys, config.layers, every=2), description=description)


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    large = config.layers == 46  # the 27B model scales by another size than its heads'
    window = keys.size("attention.sliding_window", 4096)
    description = Description(
        norm_place="both",
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=(config.hidden_size / config.heads) ** -0.5 if large else None,
        attention_cap=keys.positive("attn_logit_softcapping", 50.0),
        logit_cap=keys.positive("final_logit_softcapping", 30.0),
    )
    windows = tuple(window if (i + 1) % 2 else None for i in range(config.layers))
    return replace(config, windows=windows, description=description)


NORMS = {
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    gguf="gemma2",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    head_dim=256,
    kv_heads=4,
    eps=1e-6,
    tied=True,
    describe=describe,
    describe_gguf=describe_gguf,
    parts=NORMS,
)
