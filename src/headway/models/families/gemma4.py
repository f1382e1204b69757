"""Gemma 4's text model: layers with heads of their own, inputs for each layer, earlier keys and values in the last
ones, experts beside the feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headway.base.errors import BadModelFile, Unsupported
from headway.kernels.host.attention import Window
from headway.kernels.host.rope import Rope
from headway.models.description import Experts, KvShape, LayerInputs, PerLayer
from headway.models.families.family import Family
from headway.models.families.gemma2 import NORMS
from headway.models.families.gemma3n import DESCRIPTION, LOCAL, UNUSED, kv_sources
from headway.models.families.gguf_experts import gguf_experts
from headway.models.families.parts import stacked_experts
from headway.models.families.windows import alternating, gguf_sizes, gguf_windows
from headway.models.keys import Keys
from headway.models.rope_keys import LAYER_TYPES, hf_rope

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    if (seen := keys.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise Unsupported(
            f"config.json: use_bidirectional_attention is {seen!r}; a model that generates attends to what is before"
        )
    windows = (*alternating(keys, config.layers, every=6, default=512)[:-1], None)  # the last one never has one
    shapes = _shapes(keys, config, windows)
    ropes = tuple(_rope(keys, config, window, shape) for window, shape in zip(windows, shapes, strict=True))
    sources = kv_sources(keys, windows, keys.int("num_kv_shared_layers", 0))
    wide = 2 if keys.bool("use_double_wide_mlp", False) else 1
    size, vocab = (
        keys.size("hidden_size_per_layer_input", 256, least=0),
        keys.size("vocab_size_per_layer_input", 262144),
    )
    if size and vocab < config.vocab_size:
        raise BadModelFile(
            f"config.json: vocab_size_per_layer_input is {vocab}; it must be at least vocab_size, {config.vocab_size}"
        )
    own = PerLayer(
        kv_from=sources,
        kv_shapes=shapes,
        inners=tuple(config.intermediate_size * (wide if sources[l] != l else 1) for l in range(config.layers)),
        keys_as_values=_keys_as_values(keys, windows, sources),
        inputs=LayerInputs(size, vocab) if size else None,
        scaled=True,
    )
    description = replace(
        DESCRIPTION,
        activation=keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=config.hidden_size**0.5,
        logit_cap=keys.cap("final_logit_softcapping"),
        ropes=ropes,
        per_layer=own,
        experts=_experts(keys),
    )
    return replace(
        config, head_dim=max(s.dim for s in shapes), windows=windows, rope=ropes[-1], description=description
    )


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    layers = config.layers
    windows = gguf_windows(keys, layers, every=6)
    dims = config.head_dim, keys.size("attention.key_length_swa", config.head_dim)  # without a window, with one
    heads = gguf_sizes(keys, "attention.head_count_kv", layers)
    shapes = tuple(KvShape(heads[l], dims[window is not None]) for l, window in enumerate(windows))
    whole = replace(config.rope, kind="proportional", turned=config.rope.dim // 2)  # the file has divisors for these
    local = Rope(keys.size("rope.dimension_count_swa", dims[1]), keys.float("rope.freq_base_swa", LOCAL))
    sources = kv_sources(keys, windows, keys.int("attention.shared_kv_layers", 0))
    size = keys.size("embedding_length_per_layer_input", 0, least=0)
    own = PerLayer(
        kv_from=sources,
        kv_shapes=shapes,
        inners=gguf_sizes(keys, "feed_forward_length", layers),
        keys_as_values=frozenset(
            l for l in range(layers) if sources[l] == l and f"blk.{l}.attn_v.weight" not in tensors
        ),
        inputs=LayerInputs(size, config.vocab_size) if size else None,
        scaled="blk.0.layer_output_scale.weight" in tensors,
    )
    experts = None
    if keys.int("expert_count", 0):
        experts = replace(gguf_experts(keys, config), beside_dense=True)
    description = replace(
        DESCRIPTION,
        embedding_scale=config.hidden_size**0.5,
        logit_cap=keys.cap("final_logit_softcapping"),
        ropes=tuple(whole if window is None else local for window in windows),
        per_layer=own,
        experts=experts,
    )
    return replace(config, head_dim=max(dims), windows=windows, rope=whole, description=description)


def _shapes(keys: Keys, config: ModelConfig, windows: tuple[Window, ...]) -> tuple[KvShape, ...]:
    """The heads of each layer: those without a window have their own."""
    given = keys.get("per_layer_config")
    if given is None:
        heads = keys.get("num_global_key_value_heads") if keys.bool("attention_k_eq_v", False) else None
        heads = config.kv_heads if heads is None else keys.size("num_global_key_value_heads")
        whole = KvShape(heads, keys.size("global_head_dim", 512))
        return tuple(KvShape(config.kv_heads, config.head_dim) if window else whole for window in windows)
    shapes = []
    for layer in range(config.layers):
        own = given.get(str(layer), {}) if isinstance(given, dict) else None
        if not isinstance(own, dict) or own.keys() - {"head_dim", "num_key_value_heads"}:
            raise Unsupported(
                f"config.json: per_layer_config has {own!r} for layer {layer}; it may have head_dim and "
                "num_key_value_heads"
            )
        of = Keys(own, f"config.json, per_layer_config of layer {layer}")
        shapes.append(KvShape(of.size("num_key_value_heads", config.kv_heads), of.size("head_dim", config.head_dim)))
    return tuple(shapes)


def _rope(keys: Keys, config: ModelConfig, window: Window, shape: KvShape) -> Rope:
    """The rope of a layer: without a window a quarter of its pairs are rotated, unless the config says otherwise."""
    given, kind = keys.get("rope_parameters"), "full_attention" if window is None else "sliding_attention"
    if given is None:
        whole = Rope(shape.dim, 1_000_000.0, "proportional", turned=shape.dim // 8)
        return whole if window is None else Rope(shape.dim)
    if not isinstance(given, dict) or not given.keys() >= LAYER_TYPES or not isinstance(given[kind], dict):
        raise BadModelFile(
            f"config.json: rope_parameters is {given!r}; it must have an object for each of "
            f"{', '.join(sorted(LAYER_TYPES))}"
        )
    return hf_rope(keys, shape.dim, config.max_positions, 10_000.0, layers=kind)


def _keys_as_values(keys: Keys, windows: tuple[Window, ...], sources: tuple[int, ...]) -> frozenset[int]:
    if not keys.bool("attention_k_eq_v", False):
        return frozenset()
    return frozenset(l for l, window in enumerate(windows) if window is None and sources[l] == l)


def _experts(keys: Keys) -> Experts | None:
    if not keys.bool("enable_moe_block", False):
        keys.get("num_experts")  # it means nothing then
        return None
    return Experts(
        count=keys.size("num_experts"),
        per_token=keys.size("top_k_experts"),
        size=keys.size("moe_intermediate_size"),
        beside_dense=True,
    )


FAMILY = Family(
    name="gemma4",
    architectures=("Gemma4ForCausalLM",),
    model_types=("gemma4_text",),
    outer={"Gemma4ForConditionalGeneration": "gemma4_text"},
    gguf="gemma4",
    gguf_by_layer=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_dim=256,
    kv_heads=4,
    eps=1e-6,
    tied=True,
    describe=describe,
    describe_gguf=describe_gguf,
    ignored=UNUSED,
    parts={
        **NORMS,
        "layer_scale": "layer_scalar",
        "router": "router.proj.weight",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        **stacked_experts("experts.gate_up_proj"),
        "expert_down": "experts.down_proj",
        "dense_norm": "post_feedforward_layernorm_1.weight",
        "expert_in_norm": "pre_feedforward_layernorm_2.weight",
        "expert_out_norm": "post_feedforward_layernorm_2.weight",
    },
    gguf_parts={
        "layer_scale": "layer_output_scale.weight",
        "router_scale": "ffn_gate_inp.scale",
        "expert_scale": "ffn_down_exps.scale",
        **stacked_experts("ffn_gate_up_exps.weight"),
        "dense_norm": "post_ffw_norm_1.weight",
        "expert_in_norm": "pre_ffw_norm_2.weight",
        "expert_out_norm": "post_ffw_norm_2.weight",
    },
)
