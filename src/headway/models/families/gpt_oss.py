"""GPT-OSS: experts with biases and a clamped activation, attention sinks, a window on every second layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import BadModelFile
from headway.models.description import Description, Experts
from headway.models.families.family import Cut, Family
from headway.models.families.gguf_experts import gguf_experts
from headway.models.families.windows import alternating
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    if keys.get("rope_parameters") is None and keys.get("rope_scaling") is None:
        raise BadModelFile("config.json has neither rope_parameters nor rope_scaling, which this architecture needs")
    experts = Experts(
        count=keys.size("num_local_experts", 128),
        per_token=keys.size("num_experts_per_tok", 4),
        size=config.intermediate_size,
        router_bias=True,
        bias=True,
        clamp=keys.positive("swiglu_limit", 7.0),
        alpha=keys.positive("swiglu_alpha", 1.702),
    )
    description = Description(activation=keys.activation(), sinks=True, experts=experts)
    return replace(config, windows=alternating(keys, config.layers, every=2, default=128), description=description)


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    window = keys.size("attention.sliding_window", 128)
    experts = replace(gguf_experts(keys, config), router_bias=True, bias=True, clamp=7.0, alpha=1.702)
    return replace(
        config,
        rope=replace(config.rope, truncate=False),
        windows=tuple(window if (i + 1) % 2 else None for i in range(config.layers)),
        description=Description(sinks=True, experts=experts),
    )


def _gate_up(role: str, *, bias: bool) -> Cut:
    """Gates and ups take turns in the file, and a matrix is stored as [X, E, 2F]."""

    def take(tensor: Any, c: ModelConfig) -> Any:
        own = tensor[..., 0 if role == "gate" else 1 :: 2]
        return own if bias else own.swapaxes(1, 2)

    def shape(c: ModelConfig) -> tuple[int, ...]:
        count, both = c.description.experts.count, 2 * c.intermediate_size  # type: ignore[union-attr]
        return (count, both) if bias else (count, c.hidden_size, both)

    return Cut(f"mlp.experts.gate_up_proj{'_bias' if bias else ''}", shape, take)


def _down(c: ModelConfig) -> tuple[int, ...]:
    assert c.description.experts is not None
    return (c.description.experts.count, c.intermediate_size, c.hidden_size)


FAMILY = Family(
    name="gpt-oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    gguf="gpt-oss",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    biased=True,
    theta=150_000.0,
    head_dim=64,
    kv_heads=8,
    eps=1e-5,
    experts=True,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "router": "mlp.router.weight",
        "expert_gate": _gate_up("gate", bias=False),
        "expert_up": _gate_up("up", bias=False),
        "expert_gate_bias": _gate_up("gate", bias=True),
        "expert_up_bias": _gate_up("up", bias=True),
        "expert_down": Cut("mlp.experts.down_proj", _down, lambda tensor, c: tensor.swapaxes(1, 2)),
        "expert_down_bias": "mlp.experts.down_proj_bias",
    },
    gguf_parts={"mlp_norm": "post_attention_norm.weight"},
)
