"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts and a shared one behind a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.errors import BadModelFile
from headway.models.description import Description, Experts, GatedDelta
from headway.models.families.family import Cut, Family, Part
from headway.models.families.gguf_experts import gguf_experts
from headway.models.families.qwen2_moe import dense_layers
from headway.models.families.recurrent_parts import check_activation, conv, gguf_ssm, rate
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    experts = None
    if count := keys.size("num_experts", 512, least=0):
        experts = Experts(
            count=count,
            per_token=keys.size("num_experts_per_tok", 10),
            size=keys.size("moe_intermediate_size", 512),
            normalize=keys.bool("norm_topk_prob", True),
            shared_size=keys.size("shared_expert_intermediate_size", 512),
            dense_layers=dense_layers(keys, config.layers),
        )
    return replace(config, description=delta_description(keys, config.layers, experts))


def delta_description(keys: Keys, layers: int, experts: Experts | None) -> Description:
    """The description of a config.json with gated delta nets."""
    check_activation(keys)
    kinds = keys.per_layer("layer_types", layers, {"linear_attention": True, "full_attention": False})
    every = keys.size("full_attention_interval", 4)
    recurrent = frozenset(i for i in range(layers) if (kinds[i] if kinds else (i + 1) % every))
    what = GatedDelta(
        key_heads=keys.size("linear_num_key_heads", 16),
        value_heads=keys.size("linear_num_value_heads", 32),
        key_dim=keys.size("linear_key_head_dim", 128),
        value_dim=keys.size("linear_value_head_dim", 128),
        taps=keys.size("linear_conv_kernel_dim", 4),
    )
    return Description(
        norm="rms+1",
        gated_attention=True,
        experts=experts,
        recurrence=what if recurrent else None,
        recurrent_layers=recurrent,
    )


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    size = keys.size("expert_shared_feed_forward_length")
    experts = replace(gguf_experts(keys, config), shared_size=size)
    return replace(config, description=gguf_delta_description(keys, config.layers, experts))


def gguf_delta_description(keys: Keys, layers: int, experts: Experts | None, *, cycled: bool = False) -> Description:
    """The description of GGUF metadata; norm weights do not count from 1 there."""
    every, heads, inner = keys.size("full_attention_interval", 4), keys.size("ssm.time_step_rank"), "ssm.inner_size"
    if keys.size(inner) % heads:
        raise BadModelFile(f"GGUF: {heads} heads (ssm.time_step_rank) cannot share {keys.size(inner)} ({inner}) evenly")
    recurrent = frozenset(i for i in range(layers) if (i + 1) % every)
    what = GatedDelta(
        key_heads=keys.size("ssm.group_count"),
        value_heads=heads,
        key_dim=keys.size("ssm.state_size"),
        value_dim=keys.size(inner) // heads,
        taps=keys.size("ssm.conv_kernel"),
        cycled=cycled,
    )
    return Description(
        gated_attention=True, experts=experts, recurrence=what if recurrent else None, recurrent_layers=recurrent
    )


def gated_queries(name: str) -> dict[str, Part]:
    """Queries and their gates, which take turns by head."""
    parts: dict[str, Part] = {}
    for role, place in (("q", 0), ("attention_gate", 1)):

        def take(tensor: Any, c: ModelConfig, place: int = place) -> Any:
            rest = tensor.shape[1:]
            return tensor.reshape(c.heads, 2, c.head_dim, *rest)[:, place].reshape(-1, *rest)

        def rows(c: ModelConfig) -> int:
            return 2 * c.heads * c.head_dim

        parts[role] = Cut(f"{name}.weight", lambda c: (rows(c), c.hidden_size), take)
        parts[f"{role}_bias"] = Cut(f"{name}.bias", lambda c: (rows(c),), take)
    return parts


def by_key_head(name: str, sizes: tuple[str, ...], own: tuple[str, ...]) -> Cut:
    """Some parts of a matrix that has its rows by key heads: for each head those of every part in `sizes`."""

    def rows(part: str, w: GatedDelta) -> int:
        share = w.value_heads // w.key_heads
        return {"q": w.key_dim, "k": w.key_dim, "v": share * w.value_dim, "z": share * w.value_dim}.get(part, share)

    def take(tensor: Any, c: ModelConfig) -> Any:
        w = _delta(c)
        counts = [rows(part, w) for part in sizes]
        numbers = np.arange(sum(counts) * w.key_heads).reshape(w.key_heads, -1)
        places = dict(zip(sizes, np.split(numbers, np.cumsum(counts)[:-1], 1), strict=True))
        return tensor[np.concatenate([places[part].ravel() for part in own])]

    def shape(c: ModelConfig) -> tuple[int, int]:
        w = _delta(c)
        return sum(rows(part, w) for part in sizes) * w.key_heads, c.hidden_size

    return Cut(f"{name}.weight", shape, take)


def _delta(c: ModelConfig) -> GatedDelta:
    assert isinstance(c.description.recurrence, GatedDelta)
    return c.description.recurrence


QKVZ, BA = ("q", "k", "v", "z"), ("b", "a")
DELTA_PARTS: dict[str, Part] = {
    "mix_norm": "linear_attn.norm.weight",
    "mix_out": "linear_attn.out_proj.weight",
    "step_bias": "linear_attn.dt_bias",
    "rate": rate("linear_attn.A_log"),
    **conv("linear_attn.conv1d"),
    **gated_queries("self_attn.q_proj"),
}
GGUF_DELTA_PARTS: dict[str, Part] = {
    "mlp_norm": "post_attention_norm.weight",
    "mix_qkv": "attn_qkv.weight",
    "mix_gate": "attn_gate.weight",
    **gguf_ssm(columns=False),
    **gated_queries("attn_q"),
}
FAMILY = Family(
    name="qwen3-next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    gguf="qwen3next",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_dim=256,
    kv_heads=2,
    eps=1e-6,
    partial=0.25,
    describe=describe,
    describe_gguf=describe_gguf,
    gguf_parts={
        **GGUF_DELTA_PARTS,
        "mix_beta": by_key_head("ssm_ba", BA, ("b",)),
        "mix_step": by_key_head("ssm_ba", BA, ("a",)),
    },
    parts={
        "mix_qkv": by_key_head("linear_attn.in_proj_qkvz", QKVZ, ("q", "k", "v")),
        "mix_gate": by_key_head("linear_attn.in_proj_qkvz", QKVZ, ("z",)),
        "mix_beta": by_key_head("linear_attn.in_proj_ba", BA, ("b",)),
        "mix_step": by_key_head("linear_attn.in_proj_ba", BA, ("a",)),
        **DELTA_PARTS,
    },
    ignored=r"mtp\..*",
)
