"""Mamba-2: state-space layers alone, without attention or a feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import BadModelFile
from headway.models.description import Description, Mamba2
from headway.models.families.family import Family
from headway.models.families.recurrent_parts import check_activation, gguf_mamba2, gguf_ssm, mamba2_parts, step_limits
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

POSITIONS = 1 << 20  # there are no positions to run out of; contexts must end somewhere


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    heads, head_dim, expand = keys.size("num_heads", 128), keys.size("head_dim", 64), keys.size("expand", 2)
    if heads * head_dim != expand * config.hidden_size:
        raise BadModelFile(
            f"config.json: {heads} heads of {head_dim} (num_heads, head_dim) do not make up "
            f"{expand * config.hidden_size} (hidden_size × expand)"
        )
    what = Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=keys.size("n_groups", 8),
        state_size=keys.size("state_size", 128),
        taps=keys.size("conv_kernel", 4),
        conv_bias=keys.bool("use_conv_bias", True),
        bias=keys.bool("use_bias", False),
        steps=step_limits(keys),
    )
    check_activation(keys)
    return _described(config, what)


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    return _described(config, gguf_mamba2(keys, tensors))


def _described(config: ModelConfig, what: Mamba2) -> ModelConfig:
    layers = frozenset(range(config.layers))
    return replace(config, description=Description(recurrence=what, recurrent_layers=layers, no_feed_forward=True))


FAMILY = Family(
    name="mamba2",
    architectures=("Mamba2ForCausalLM",),
    model_types=("mamba2",),
    gguf="mamba2",
    head_dim=64,
    inner=2,
    eps=1e-5,
    keys={"num_attention_heads": "num_heads", "num_key_value_heads": "num_heads", "rms_norm_eps": "layer_norm_epsilon"},
    defaults={"num_heads": 128, "max_position_embeddings": POSITIONS},
    gguf_keys={
        "attention.head_count": "ssm.time_step_rank",
        "attention.head_count_kv": "ssm.time_step_rank",
        "feed_forward_length": "ssm.inner_size",
    },
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "embedding": "backbone.embeddings.weight",
        "final_norm": "backbone.norm_f.weight",
        "layer": "backbone.layers.{}.",
        "input_norm": "norm.weight",
        **mamba2_parts("mixer"),
    },
    gguf_parts=gguf_ssm(columns=True),
)
