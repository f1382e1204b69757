"""Gemma 3: Gemma 2 with normed queries and keys, and two rope bases: windows on five layers of six."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import Unsupported
from headway.kernels.host.rope import Rope
from headway.models.description import Description
from headway.models.families.family import Family
from headway.models.families.gemma2 import NORMS
from headway.models.families.windows import alternating
from headway.models.keys import Keys
from headway.models.rope_keys import local_rope

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


LOCAL = 10_000.0  # the rope base of layers with a window


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    windows = alternating(keys, config.layers, every=keys.size("sliding_window_pattern", 6))
    if (cap := keys.cap("attn_logit_softcapping")) is not None:
        raise Unsupported(f"config.json: attn_logit_softcapping is {cap}; Gemma 3 does not cap its scores")
    theta = keys.float("rope_local_base_freq", LOCAL)
    local = local_rope(keys, config.head_dim, config.max_positions, theta)
    description = Description(
        norm="rms+1",
        norm_place="both",
        activation=keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=config.hidden_size**0.5,
        attention_scale=keys.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_cap=keys.cap("final_logit_softcapping"),
        ropes=tuple(config.rope if window is None else local for window in windows),
    )
    return replace(config, windows=windows, description=description)


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    large = config.layers == 62  # the 27B model scales by another size than its heads'
    window = keys.size("attention.sliding_window", 4096)
    windows = tuple(window if (i + 1) % 6 else None for i in range(config.layers))
    local = Rope(config.rope.dim, keys.float("rope.freq_base_swa", LOCAL))
    description = Description(
        norm_place="both",
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=(config.hidden_size / config.heads) ** -0.5 if large else None,
        logit_cap=keys.cap("final_logit_softcapping") if keys.get("final_logit_softcapping") else None,
        ropes=tuple(config.rope if window is None else local for window in windows),
    )
    return replace(config, windows=windows, description=description)


FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    outer={"Gemma3ForConditionalGeneration": "gemma3_text"},
    gguf="gemma3",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    theta=1_000_000.0,
    head_dim=256,
    kv_heads=4,
    eps=1e-6,
    tied=True,
    defaults={"vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072},
    describe=describe,
    describe_gguf=describe_gguf,
    parts=NORMS,
)
