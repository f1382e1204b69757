"""GPT-NeoX (Pythia): layer norms, parallel attention and feed-forward, a quarter of each head rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.models.description import Description
from headway.models.families.family import LAYER_NORM_GGUF, Family
from headway.models.families.parts import grouped, stacked
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    return _described(config, keys.activation(default="gelu"), keys.bool("use_parallel_residual", True))


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return _described(config, "gelu", keys.bool("use_parallel_residual", True))


def _described(config: ModelConfig, activation: str, parallel: bool) -> ModelConfig:
    description = Description(norm="layer", norm_bias=True, gated=False, activation=activation, parallel=parallel)
    return replace(config, mlp_bias=True, description=description)


FAMILY = Family(
    name="gpt-neox",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    gguf="gptneox",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias=True,
    biased=True,
    partial=0.25,
    eps=1e-5,
    keys={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
        "num_key_value_heads": "num_attention_heads",
    },
    gguf_keys=LAYER_NORM_GGUF,
    ignored=r"(gpt_neox\.)?layers\.\d+\.attention\.(masked_)?bias",
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "embedding": "gpt_neox.embed_in.weight",
        "final_norm": "gpt_neox.final_layer_norm.weight",
        "output": "embed_out.weight",
        "layer": "gpt_neox.layers.{}.",
        **grouped("attention.query_key_value"),
        "o": "attention.dense.weight",
        "up": "mlp.dense_h_to_4h.weight",
        "down": "mlp.dense_4h_to_h.weight",
    },
    gguf_parts=stacked("attn_qkv", ("q", "k", "v")),
)
