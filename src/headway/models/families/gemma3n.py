"""Gemma 3n's text model: residuals side by side, inputs for each layer, earlier keys and values in the last ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import BadModelFile
from headway.kernels.host.rope import Rope
from headway.models.description import AltUp, Description, KvShape, LayerInputs, PerLayer
from headway.models.families.family import Each, Family
from headway.models.families.gemma2 import NORMS
from headway.models.families.windows import alternating, gguf_sizes, gguf_windows
from headway.models.keys import Keys
from headway.models.rope_keys import local_rope

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

LOCAL = 10_000.0  # the rope base of layers with a window
SPARSE, SHARE = 10, 0.95  # the first layers of a deep model, and the gates that they cut off, when the config is silent
RANK, KEPT = (
    64,
    20,
)  # of the published models, in files that do not say: beside attention; layers with keys of their own
DESCRIPTION = Description(norm_place="both", activation="gelu_tanh", attention_scale=1.0)
# Files may have these for layers that attend to another's keys and values.
UNUSED = r"(model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)|blk\.\d+\.attn_(k|v|k_norm))\.weight"


def describe(keys: Keys, config: ModelConfig) -> ModelConfig:
    keys.get("query_pre_attn_scalar")  # published, and without meaning: scores are not scaled
    layers = config.layers
    windows = alternating(keys, layers, every=5, default=512)
    local = local_rope(keys, config.head_dim, config.max_positions, keys.float("rope_local_base_freq", LOCAL))
    streams, active = keys.size("altup_num_inputs", 4, least=2), keys.int("altup_active_idx", 0)
    if not 0 <= active < streams:
        raise BadModelFile(f"config.json: altup_active_idx is {active}; it must be between 0 and {streams - 1}")
    inputs = LayerInputs(keys.size("hidden_size_per_layer_input", 256), keys.size("vocab_size_per_layer_input", 262144))
    own = PerLayer(
        kv_from=kv_sources(keys, windows, keys.int("num_kv_shared_layers", 15)),
        kv_shapes=(KvShape(config.kv_heads, config.head_dim),) * layers,
        inners=_inners(keys, config),
        inputs=inputs,
    )
    altup = AltUp(
        streams=streams,
        active=active,
        rank=keys.size("laurel_rank", 64),
        sparsity=_sparsity(keys, layers),
        scaled=keys.bool("altup_correct_scale", True),
    )
    description = replace(
        DESCRIPTION,
        activation=keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=config.hidden_size**0.5,
        logit_cap=keys.cap("final_logit_softcapping"),
        ropes=tuple(config.rope if window is None else local for window in windows),
        per_layer=own,
        altup=altup,
    )
    return replace(config, windows=windows, description=description)


def describe_gguf(keys: Keys, config: ModelConfig, tensors: set[str]) -> ModelConfig:
    layers = config.layers
    windows = gguf_windows(keys, layers, every=5)
    local = Rope(config.rope.dim, keys.float("rope.freq_base_swa", LOCAL))
    own = PerLayer(
        kv_from=kv_sources(keys, windows, keys.int("attention.shared_kv_layers", max(0, layers - KEPT))),
        kv_shapes=(KvShape(config.kv_heads, config.head_dim),) * layers,
        inners=gguf_sizes(keys, "feed_forward_length", layers),
        inputs=LayerInputs(keys.size("embedding_length_per_layer_input", 256), config.vocab_size),
    )
    altup = AltUp(
        streams=keys.size("altup.num_inputs", 4, least=2),
        active=keys.int("altup.active_idx", 0),
        rank=RANK,
        sparsity=_gguf_sparsity(keys, layers),
    )
    description = replace(
        DESCRIPTION,
        embedding_scale=config.hidden_size**0.5,
        logit_cap=keys.positive("final_logit_softcapping", 30.0),
        ropes=tuple(config.rope if window is None else local for window in windows),
        per_layer=own,
        altup=altup,
    )
    return replace(config, windows=windows, description=description)


def _gguf_sparsity(keys: Keys, layers: int) -> tuple[float, ...]:
    """The share of a normal distribution below each layer's limit, which is minus infinity where there is none."""
    given = keys.get("activation_sparsity_scale")
    if given is None:
        return (SHARE,) * min(SPARSE, layers) + (0.0,) * max(0, layers - SPARSE)
    if len(given) != layers or any(not isinstance(scale, float) or math.isnan(scale) for scale in given):
        raise BadModelFile(
            f"GGUF: {keys.prefix}activation_sparsity_scale is {list(given)!r}; it must be a number for each of "
            f"{layers} layers"
        )
    from statistics import NormalDist  # with fractions and decimals, which no other model needs

    return tuple(NormalDist().cdf(scale) for scale in given)


def kv_sources(keys: Keys, windows: tuple[Any, ...], shared: int) -> tuple[int, ...]:
    """The layer whose keys and values each attends to: the last `shared` ones have those of the last one before them
    that has a window too, or none."""
    first = len(windows) - shared
    if not 0 <= shared < len(windows):
        raise BadModelFile(
            f"{keys.source}: num_kv_shared_layers is {shared}; it must be between 0 and {len(windows) - 1}"
        )
    sources = list(range(len(windows)))
    for layer in range(first, len(windows)):
        alike = [l for l in range(first) if (windows[l] is None) == (windows[layer] is None)]
        if not alike:
            raise BadModelFile(
                f"{keys.source}: num_kv_shared_layers is {shared}, and no layer before {first} is of the kind of layer "
                f"{layer}, which would attend to its keys and values"
            )
        sources[layer] = alike[-1]
    return tuple(sources)


def _inners(keys: Keys, config: ModelConfig) -> tuple[int, ...]:
    given = keys.get("intermediate_size")
    if not isinstance(given, list):
        return (config.intermediate_size,) * config.layers
    if len(given) != config.layers or any(type(size) is not int or size < 1 for size in given):
        raise BadModelFile(
            f"config.json: intermediate_size must have a positive integer for each of {config.layers} layers, "
            f"not {given!r}"
        )
    return tuple(given)


def _sparsity(keys: Keys, layers: int) -> tuple[float, ...]:
    given = keys.get("activation_sparsity_pattern")
    if given is None:
        sparse = SPARSE if layers > SPARSE else 0
        return (SHARE,) * sparse + (0.0,) * (layers - sparse)
    fits = isinstance(given, list) and len(given) == layers
    if not fits or any(type(share) not in (int, float) or not 0 <= share < 1 for share in given):
        raise BadModelFile(
            f"config.json: activation_sparsity_pattern must have a number from 0 to less than 1 for each of {layers} "
            f"layers, not {given!r}"
        )
    return tuple(map(float, given))


FAMILY = Family(
    name="gemma3n",
    architectures=("Gemma3nForCausalLM",),
    model_types=("gemma3n_text",),
    outer={"Gemma3nForConditionalGeneration": "gemma3n_text"},
    gguf="gemma3n",
    gguf_by_layer=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    theta=1_000_000.0,
    head_dim=256,
    kv_heads=2,
    inner_by_layer=True,
    eps=1e-6,
    tied=True,
    defaults={"final_logit_softcapping": 30.0},
    describe=describe,
    describe_gguf=describe_gguf,
    ignored=UNUSED,
    parts={
        **NORMS,
        "altup_spread": Each("model.altup_projections.{}.weight"),
        "altup_gather": Each("model.altup_unembed_projections.{}.weight"),
        "laurel_down": "laurel.linear_left.weight",
        "laurel_up": "laurel.linear_right.weight",
        "laurel_norm": "laurel.post_laurel_norm.weight",
        "altup_norm": "altup.router_norm.weight",
        "altup_router": "altup.modality_router.weight",
        "altup_predict": "altup.prediction_coefs.weight",
        "altup_correct": "altup.correction_coefs.weight",
        "altup_scale": "altup.correct_output_scale",
    },
    gguf_parts={
        "altup_spread": "altup_proj.weight",
        "altup_gather": "altup_unembd_proj.weight",
        "laurel_down": "laurel_l.weight",
        "laurel_up": "laurel_r.weight",
        "laurel_norm": "laurel_post_norm.weight",
        "altup_norm": "altup_router_norm.weight",
        "altup_router": "altup_router.weight",
        "altup_predict": "altup_predict_coef.weight",
        "altup_correct": "altup_correct_coef.weight",
        "altup_scale": "altup_correct_scale.weight",
    },
)
