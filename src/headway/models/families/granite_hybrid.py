"""Granite hybrid: Granite with state-space layers, and experts beside a feed-forward that sees every token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.kernels.host.rope import Rope
from headway.models.description import Experts
from headway.models.families.family import Cut, Family
from headway.models.families.gguf_experts import gguf_experts
from headway.models.families.granite import gguf_multipliers, multipliers
from headway.models.families.parts import expert_parameters, stacked_experts
from headway.models.families.recurrent_parts import (
    check_activation,
    gguf_mamba2,
    gguf_recurrent_layers,
    gguf_ssm,
    mamba2_of,
    mamba2_parts,
)
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

BIASED = {"qkv": "attn_q", "o": "attn_output"}
KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    check_activation(keys)
    kinds = keys.per_layer(
        "layers_block_type" if keys.has("layers_block_type") else "layer_types", config.layers, KINDS
    )
    layers = frozenset(i for i in range(config.layers) if kinds is None or kinds[i])
    rotated = keys.choice("position_embedding_type", "none", {"rope": "rope", "none": "none", "nope": "none"}) == "rope"
    what = mamba2_of(keys, config, inner=keys.size("mamba_expand", 2) * config.hidden_size)
    shared, count = keys.size("shared_intermediate_size", 1024), keys.size("num_local_experts", 8, least=0)
    experts = None
    if count:
        each = keys.size("num_experts_per_tok", 2)
        experts = Experts(count, each, config.intermediate_size, shared_size=shared, shared_gated=False)
    description = replace(
        multipliers(keys),
        ropes=None if rotated else (Rope(0),) * config.layers,
        recurrence=what if layers else None,
        recurrent_layers=layers,
        experts=experts,
    )
    size = config.intermediate_size if count else shared
    return replace(config, intermediate_size=size, description=description)


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    rotated, experts = keys.bool("rope.scaling.finetuned", True), None
    if keys.int("expert_count", 0):
        shared = keys.size("expert_shared_feed_forward_length", 0, least=0)
        experts = replace(gguf_experts(keys, config), shared_size=shared, shared_gated=False)
    description = replace(
        gguf_multipliers(keys),
        ropes=None if rotated else (Rope(0),) * config.layers,
        recurrence=gguf_mamba2(keys, tensors),
        recurrent_layers=gguf_recurrent_layers(keys, config.layers),
        experts=experts,
    )
    biases = {f"{role}_bias": any(name.endswith(f".{end}.bias") for name in tensors) for role, end in BIASED.items()}
    return replace(config, description=description, **biases)


def _shared(first: bool) -> Cut:
    """Half of the matrix of gates and ups that see every token: the feed-forward of a model without experts."""

    def size(c: ModelConfig) -> int:
        experts = c.description.experts
        return c.intermediate_size if experts is None else experts.shared_size

    def take(tensor: Any, c: ModelConfig) -> Any:
        return tensor[: size(c)] if first else tensor[size(c) :]

    return Cut("shared_mlp.input_linear.weight", lambda c: (2 * size(c), c.hidden_size), take)


FAMILY = Family(
    name="granite-hybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    gguf="granitehybrid",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    eps=1e-6,
    interleaved_gguf=True,
    describe=describe,
    describe_gguf=describe_gguf,
    gguf_parts=gguf_ssm(columns=True),
    parts={
        "router": "block_sparse_moe.router.layer.weight",
        **stacked_experts("block_sparse_moe.input_linear.weight"),
        "expert_down": "block_sparse_moe.output_linear.weight",
        "shared_gate": _shared(True),
        "shared_up": _shared(False),
        "shared_down": "shared_mlp.output_linear.weight",
        "gate": _shared(True),
        "up": _shared(False),
        "down": "shared_mlp.output_linear.weight",
        **mamba2_parts("mamba"),
    },
    modules={"router": "block_sparse_moe.router", **expert_parameters("block_sparse_moe.experts")},
)
