"""How a config says that positions become angles: rope parameters of config.json and of GGUF metadata."""

from __future__ import annotations

import math
from dataclasses import replace

from headway.base.errors import BadModelFile, Unsupported
from headway.base.text import short_repr
from headway.kernels.host.rope import Rope
from headway.models.keys import LARGEST, Keys

LAYER_TYPES = {"full_attention", "sliding_attention"}
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # of longrope in GGUF files
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# GGUF keys for rope variants that this decoder does not have, and the values that change nothing.
ATTENTION_FACTOR = "rope.scaling.attn_factor"
GGUF_ROPE_EXTRAS = {
    ATTENTION_FACTOR: 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.alpha": 0.0,
}


def hf_rope(
    top: Keys, head_dim: int, positions: int, theta: float, *, partial: float | None = None, layers: str | None = None
) -> Rope:
    """The rope of a config.json; `layers` is full_attention or sliding_attention where these have their own.

    `theta` and `partial` are what a config that does not say so means; without `partial` heads are rotated whole.
    """
    scaling = top.get("rope_parameters") or top.get("rope_scaling") or {}
    if isinstance(scaling, dict) and layers is not None and LAYER_TYPES & scaling.keys():
        scaling = scaling.get(layers) or {}
    if not isinstance(scaling, dict):
        raise BadModelFile(f"config.json: the rope parameters are {scaling!r}; they must be an object")
    keys = Keys(scaling, "config.json, rope parameters")
    theta = keys.float("rope_theta", top.float("rope_theta", theta))
    share = keys.float("partial_rotary_factor", top.float("partial_rotary_factor", partial or 1.0))
    if not 0 < share <= 1:
        raise BadModelFile(f"config.json: partial_rotary_factor is {share}; it must be above 0 and at most 1")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    original = top.get("original_max_position_embeddings")
    if original is not None:  # the top level wins, as in transformers
        keys.data = {**scaling, "original_max_position_embeddings": original}
    if kind == "proportional":
        return _proportional(keys, head_dim, share, theta)
    if partial is None and share != 1:
        raise Unsupported(f"config.json: partial_rotary_factor is {share}; this family rotates whole heads")
    return _rope(keys, kind, int(head_dim * share), theta, positions)


def _proportional(keys: Keys, head_dim: int, partial: float, theta: float) -> Rope:
    """The first pairs of a head are rotated, by the angles that they would have if all were."""
    plain, turned = _rope(keys, "default", head_dim, theta, 0), int(partial * head_dim // 2)
    if turned < 1:
        raise BadModelFile(f"{keys.source}: {partial} of {head_dim} dimensions are rotated; it must be 2 or more")
    return replace(plain, kind="proportional", turned=turned, factor=keys.positive("factor", 1.0))


def _rope(keys: Keys, kind: str, dim: int, theta: float, positions: int) -> Rope:
    if theta <= 1:
        raise BadModelFile(f"{keys.source}: rope theta is {theta}; it must be above 1")
    if dim < 2 or dim % 2:
        raise BadModelFile(f"{keys.source}: {dim} rotated dimensions; it must be an even number of at least 2")
    match kind:
        case "default" | "mrope":  # where a token's three positions are one
            return Rope(dim, theta)
        case "linear":
            return Rope(dim, theta, "linear", factor=keys.positive("factor"))
        case "llama3":
            low, high = keys.positive("low_freq_factor"), keys.positive("high_freq_factor")
            if low > high:
                raise BadModelFile(f"{keys.source}: low_freq_factor {low} must not be above high_freq_factor {high}")
            return Rope(
                dim,
                theta,
                "llama3",
                factor=keys.positive("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_positions=_original(keys, None),
            )
        case "yarn":
            original = _original(keys, positions)
            return Rope(
                dim,
                theta,
                "yarn",
                factor=keys.positive("factor", positions / original),
                original_positions=original,
                beta_fast=keys.positive("beta_fast", 32.0),
                beta_slow=keys.positive("beta_slow", 1.0),
                attention_factor=keys.optional("attention_factor"),
                mscale=keys.optional("mscale"),
                mscale_all_dim=keys.optional("mscale_all_dim"),
                truncate=keys.bool("truncate", True),
            )
        case "longrope" | "su":  # its older name
            return _longrope(keys, dim, theta, positions)
    raise Unsupported(
        f"{keys.source}: rope type {kind!r} is not supported; use default, linear, llama3, yarn, longrope or "
        "proportional"
    )


def _longrope(keys: Keys, dim: int, theta: float, positions: int) -> Rope:
    """The short factors: `original_positions` is as far as they go."""
    original = _original(keys, positions)
    factor = keys.positive("factor", positions / original)
    if original == 1 < factor:
        raise BadModelFile(f"{keys.source}: original_max_position_embeddings is 1; longrope needs at least 2")
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = keys.get("short_factor")
    if not isinstance(factors, list) or not all(type(f) in (int, float) and 0 < f <= LARGEST for f in factors):
        raise BadModelFile(
            f"{keys.source}: short_factor is {short_repr(factors)}; it must be a list of positive numbers"
        )
    if len(factors) != dim // 2:
        raise BadModelFile(f"{keys.source}: short_factor has {len(factors)} entries; {dim} dimensions need {dim // 2}")
    return Rope(
        dim,
        theta,
        "longrope",
        original_positions=original,
        attention_factor=keys.positive("attention_factor", default),
        factors=tuple(map(float, factors)),
    )


def _original(keys: Keys, default: int | None) -> int:
    key = "original_max_position_embeddings"
    value = keys.int(key, default)
    if not 1 <= value <= LARGEST:
        raise BadModelFile(f"{keys.source}: {key} is {value}; it must be between 1 and {LARGEST}")
    return value


def gguf_rope(keys: Keys, head_dim: int, theta: float, *, latent: bool = False, short_factors: bool = False) -> Rope:
    """The rope of a GGUF file. Of a family with latent attention, yarn scales scores there and not the rotation.

    `short_factors` says that the file has those of longrope.
    """
    dim = keys.int("rope.dimension_count", head_dim)
    theta = keys.float("rope.freq_base", theta)
    for key, plain in GGUF_ROPE_EXTRAS.items():
        if short_factors and key == ATTENTION_FACTOR:
            continue
        if (value := keys.get(key)) is not None and value != plain:
            raise Unsupported(f"GGUF: {keys.prefix}{key} is {value!r}; only {plain}, or no such key, is supported")
    if short_factors:
        return _gguf_longrope(keys, dim, theta)
    kind = keys.get("rope.scaling.type") or "default"
    if kind == "longrope":
        raise BadModelFile(f"GGUF: the rope type is 'longrope', and the file has no {SHORT_FACTORS!r}")
    if kind in ("default", "none"):
        return _rope(keys, "default", dim, theta, 0)
    renamed = {
        "factor": keys.get("rope.scaling.factor"),
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    multiplier = keys.float(LOG_MULTIPLIER, 0.0)
    if latent:
        renamed |= {"attention_factor": 1.0, "mscale_all_dim": 10 * multiplier}
    elif multiplier:
        renamed |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return _rope(Keys(renamed, "GGUF, rope scaling"), kind, dim, theta, keys.int("context_length"))


def _gguf_longrope(keys: Keys, dim: int, theta: float) -> Rope:
    """Frequencies are divided by the file's factors when its weights are read."""
    kind = keys.get("rope.scaling.type") or "longrope"
    if kind != "longrope":
        raise BadModelFile(f"GGUF: the rope type is {kind!r}, and the file has {SHORT_FACTORS!r}, which is longrope's")
    plain = _rope(keys, "default", dim, theta, 0)
    original = keys.size("rope.scaling.original_context_length")
    scale = keys.positive(ATTENTION_FACTOR, 1.0)
    return replace(
        plain, kind="longrope", original_positions=original, attention_factor=scale, factors=(1.0,) * (dim // 2)
    )


def reach(rope: Rope, positions: int) -> tuple[int, str]:
    """How many positions a model has, and why there are not as many as its config says.

    Longer contexts with longrope have other factors, by which every key would be rotated again.
    """
    if rope.kind != "longrope" or positions <= rope.original_positions:
        return positions, ""
    return rope.original_positions, f"longrope's factors for longer contexts, up to {positions}, are not supported"


def local_rope(top: Keys, head_dim: int, positions: int, theta: float) -> Rope:
    """The rope of layers with a sliding window: their own parameters, or what is not scaled."""
    scaling = top.get("rope_parameters")
    if isinstance(scaling, dict) and LAYER_TYPES & scaling.keys():
        return hf_rope(top, head_dim, positions, theta, layers="sliding_attention")
    return Rope(head_dim, theta)
