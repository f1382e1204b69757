"""Llama 4's text model: layers without a rope among others with chunks and normed queries and keys; experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import BadModelFile, Unsupported
from headway.kernels.host.attention import ChunkWindow, Window
from headway.kernels.host.rope import Rope
from headway.models.description import Description, Experts, Temperature
from headway.models.families.family import Cut, Family
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


# Of the published models.
EVERY = 4  # one layer of so many has no rope
CHUNK, FLOOR, SCALE = 8192, 8192.0, 0.1
WITHOUT_NORM = 128  # experts of the model that does not norm queries and keys


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    experts = Experts(
        count=keys.size("num_local_experts", 16),
        per_token=keys.size("num_experts_per_tok", 1),
        size=config.intermediate_size,
        sigmoid_inputs=True,
        shared_size=config.intermediate_size,
        shared_gated=False,
        dense_layers=_dense_layers(keys, config.layers),
    )
    rotated, unit = _rotated(keys, config.layers), keys.bool("use_qk_norm", True)
    temperature = None
    if keys.bool("attn_temperature_tuning", True):
        temperature = Temperature(keys.positive("floor_scale", FLOOR), keys.float("attn_scale", SCALE))
    rope = replace(config.rope, attention_factor=1.0) if unit else config.rope  # queries and keys are normed after it
    return replace(
        config,
        rope=rope,
        intermediate_size=keys.size("intermediate_size_mlp", 16384),
        qk_norm=unit,
        windows=_windows(keys, rotated),
        description=Description(
            qk_norm="unit" if unit else "head",
            ropes=tuple(rope if each else Rope(0) for each in rotated),
            temperature=temperature,
            activation=keys.activation(),
            experts=experts if len(experts.dense_layers) < config.layers else None,
        ),
    )


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    """Its files do not say which layers have a rope, how long chunks are, or how queries grow: that is as in the
    published models, of which the one with 128 experts does not norm queries and keys."""
    if keys.get("attention.sliding_window") == 0:
        raise Unsupported("GGUF: llama4.attention.sliding_window is 0; a file without chunks is not supported")
    if keys.has("attention.sliding_window_pattern"):
        raise Unsupported("GGUF: llama4.attention.sliding_window_pattern is not supported; one layer of 4 has no rope")
    rotated = tuple(bool((i + 1) % EVERY) for i in range(config.layers))
    step, count = keys.size("interleave_moe_layer_step"), keys.size("expert_count")
    size = keys.size("expert_feed_forward_length")
    dense = frozenset(i for i in range(config.layers) if (i + 1) % step)
    experts = Experts(
        count=count,
        per_token=keys.size("expert_used_count"),
        size=size,
        sigmoid_inputs=True,
        shared_size=size,
        shared_gated=False,
        dense_layers=dense,
    )
    return replace(
        config,
        qk_norm=count != WITHOUT_NORM,
        windows=tuple(ChunkWindow(CHUNK) if each else None for each in rotated),
        description=Description(
            qk_norm="unit" if count != WITHOUT_NORM else "head",
            ropes=tuple(config.rope if each else Rope(0) for each in rotated),
            temperature=Temperature(FLOOR, SCALE),
            experts=experts if len(dense) < config.layers else None,
        ),
    )


def _rotated(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Which layers have a rope: an empty list says as much as none."""
    every = keys.size("no_rope_layer_interval", EVERY)
    if keys.get("no_rope_layers"):
        return keys.per_layer("no_rope_layers", layers, {1: True, 0: False}) or ()
    return tuple(bool((i + 1) % every) for i in range(layers))


def _windows(keys: Keys, rotated: tuple[bool, ...]) -> tuple[Window, ...]:
    """A chunk in layers of chunked attention, which are those with a rope unless the config says otherwise."""
    chunk = ChunkWindow(keys.size("attention_chunk_size", CHUNK))
    known = {"chunked_attention": chunk, "full_attention": None}
    kinds = keys.per_layer("layer_types", len(rotated), known)
    return kinds or tuple(chunk if each else None for each in rotated)


def _dense_layers(keys: Keys, layers: int) -> frozenset[int]:
    step, given = keys.size("interleave_moe_layer_step", 1), keys.get("moe_layers")
    if given is None:
        given = list(range(step - 1, layers, step))
    if not isinstance(given, list) or any(type(l) is not int or not 0 <= l < layers for l in given):
        raise BadModelFile(f"config.json: moe_layers is {given!r}; it must list layers from 0 to {layers - 1}")
    return frozenset(range(layers)) - frozenset(given)


def _experts(c: ModelConfig) -> Experts:
    assert c.description.experts is not None
    return c.description.experts


def _gate_up(place: int) -> Cut:
    """Gates and then ups, in a matrix that is stored as [X, E, 2F]."""

    def take(tensor: Any, c: ModelConfig) -> Any:
        size = _experts(c).size
        return tensor[..., place * size : (place + 1) * size].swapaxes(1, 2)

    return Cut(
        "feed_forward.experts.gate_up_proj",
        lambda c: (_experts(c).count, c.hidden_size, 2 * _experts(c).size),
        take,
    )


FAMILY = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM",),
    model_types=("llama4_text",),
    outer={"Llama4ForConditionalGeneration": "llama4_text"},
    gguf="llama4",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    theta=500_000.0,
    head_dim=128,
    kv_heads=8,
    eps=1e-5,
    interleaved_hf=True,
    interleaved_gguf=True,
    turned_experts=True,
    describe=describe,
    describe_gguf=describe_gguf,
    parts={
        "gate": "feed_forward.gate_proj.weight",
        "up": "feed_forward.up_proj.weight",
        "down": "feed_forward.down_proj.weight",
        "router": "feed_forward.router.weight",
        "expert_gate": _gate_up(0),
        "expert_up": _gate_up(1),
        "expert_down": Cut(
            "feed_forward.experts.down_proj",
            lambda c: (_experts(c).count, _experts(c).size, c.hidden_size),
            lambda tensor, c: tensor.swapaxes(1, 2),
        ),
        "shared_gate": "feed_forward.shared_expert.gate_proj.weight",
        "shared_up": "feed_forward.shared_expert.up_proj.weight",
        "shared_down": "feed_forward.shared_expert.down_proj.weight",
    },
)
