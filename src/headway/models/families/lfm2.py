"""LFM2: gated short convolutions, with attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import BadModelFile
from headway.models.description import Description, ShortConv
from headway.models.families.family import Family, FirstOf
from headway.models.families.recurrent_parts import conv, gguf_recurrent_layers
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    layers = keys.per_layer("layer_types", config.layers, {"conv": True, "full_attention": False})
    if layers is None:
        attention = _attention_layers(keys, config.layers)
        layers = tuple(layer not in attention for layer in range(config.layers))
    return replace(
        config,
        tied=keys.bool("tie_embedding", config.tied),
        intermediate_size=feed_forward_size(keys, config.intermediate_size),
        description=_description(layers, keys.size("conv_L_cache", 3, least=2), keys.bool("conv_bias", False)),
    )


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    layers = gguf_recurrent_layers(keys, config.layers)
    recurrent = tuple(layer in layers for layer in range(config.layers))
    return replace(config, description=_description(recurrent, keys.size("shortconv.l_cache"), bias=False))


def _attention_layers(keys: Keys, layers: int) -> frozenset[int]:
    listed = keys.get("full_attn_idxs")
    if listed is None:
        return frozenset(range(layers))
    if not isinstance(listed, list) or any(type(l) is not int or not 0 <= l < layers for l in listed):
        raise BadModelFile(f"config.json: full_attn_idxs is {listed!r}; it must list layers from 0 to {layers - 1}")
    return frozenset(listed)


def feed_forward_size(keys: Keys, size: int) -> int:
    """The size that a config.json's rules make of `intermediate_size`."""
    size = keys.size("block_ff_dim", size)
    if not keys.bool("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in keys.data and keys.get("block_ffn_dim_multiplier") is None:
        return size
    multiple = keys.size("block_multiple_of", 256)
    return -(-int(keys.positive("block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple


def _description(recurrent: tuple[bool, ...], taps: int, bias: bool) -> Description:
    layers = frozenset(i for i, own in enumerate(recurrent) if own)
    return Description(recurrence=ShortConv(taps, bias) if layers else None, recurrent_layers=layers)


FAMILY = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    model_types=("lfm2",),
    gguf="lfm2",
    qk_norm=True,
    theta=1_000_000.0,
    kv_heads=8,
    eps=1e-5,
    tied=True,
    defaults={"intermediate_size": 12_288},  # published configs have block_ff_dim
    keys={"rms_norm_eps": "norm_eps"},
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "final_norm": "model.embedding_norm.weight",
        "input_norm": "operator_norm.weight",
        "mlp_norm": "ffn_norm.weight",
        "q_norm": "self_attn.q_layernorm.weight",
        "k_norm": "self_attn.k_layernorm.weight",
        "o": "self_attn.out_proj.weight",
        "gate": "feed_forward.w1.weight",
        "up": "feed_forward.w3.weight",
        "down": "feed_forward.w2.weight",
        "mix_in": "conv.in_proj.weight",
        "mix_out": "conv.out_proj.weight",
        **conv("conv.conv"),
    },
    gguf_parts={
        "final_norm": FirstOf(("token_embd_norm.weight", "output_norm.weight")),
        "mix_in": "shortconv.in_proj.weight",
        "mix_out": "shortconv.out_proj.weight",
        "conv": "shortconv.conv.weight",
    },
)
