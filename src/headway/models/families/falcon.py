"""Falcon: layer norms, parallel attention and feed-forward, few keys; q, k and v in one matrix by key head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import Unsupported
from headway.models.description import Description
from headway.models.families.family import LAYER_NORM_GGUF, Family, FirstOf
from headway.models.families.parts import grouped, stacked
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    if keys.bool("alibi", False):
        raise Unsupported(
            "config.json: alibi is true; Falcon with ALiBi (falcon-rw) is not supported, only with a rope"
        )
    if keys.bool("apply_residual_connection_post_layernorm", False):
        raise Unsupported(
            "config.json: apply_residual_connection_post_layernorm is true; residuals after norms are not supported"
        )
    new, parallel = keys.bool("new_decoder_architecture", False), keys.bool("parallel_attn", True)
    norms = keys.size("num_ln_in_parallel_attn", 2 if new else 1)
    shared = 1 if keys.bool("multi_query", True) else config.heads
    kv_heads = keys.size("num_kv_heads", config.heads) if new else shared
    if new and not parallel:
        raise Unsupported("config.json: new_decoder_architecture is true and parallel_attn false, which no model has")
    return _described(config, keys.activation("activation", "gelu"), kv_heads, parallel, two=new and norms == 2)


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return _described(config, "gelu", config.kv_heads, parallel=True, two="blk.0.attn_norm_2.weight" in tensors)


def _described(config: ModelConfig, activation: str, kv_heads: int, parallel: bool, *, two: bool) -> ModelConfig:
    description = Description(
        norm="layer",
        norm_bias=True,
        parallel=parallel,
        one_norm=parallel and not two,
        gated=False,
        activation=activation,
    )
    return replace(config, kv_heads=kv_heads, description=description)


FAMILY = Family(
    name="falcon",
    architectures=("FalconForCausalLM",),
    model_types=("falcon",),
    gguf="falcon",
    qkv_bias="bias",
    o_bias="bias",
    mlp_bias="bias",
    inner=4,
    eps=1e-5,
    tied=True,
    defaults={"max_position_embeddings": 2048},
    keys={"rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "ffn_hidden_size"},
    gguf_keys=LAYER_NORM_GGUF,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "embedding": "transformer.word_embeddings.weight",
        "final_norm": "transformer.ln_f.weight",
        "layer": "transformer.h.{}.",
        "input_norm": FirstOf(("ln_attn.weight", "input_layernorm.weight")),
        "mlp_norm": FirstOf(("ln_mlp.weight", "post_attention_layernorm.weight")),
        **grouped("self_attention.query_key_value"),
        "o": "self_attention.dense.weight",
        "up": "mlp.dense_h_to_4h.weight",
        "down": "mlp.dense_4h_to_h.weight",
    },
    gguf_parts={
        "input_norm": FirstOf(("attn_norm_2.weight", "attn_norm.weight")),
        "mlp_norm": "attn_norm.weight",
        **stacked("attn_qkv", ("q", "k", "v")),
    },
)
