"""The keys of a GGUF file that say a model's config: what `from_gguf` reads, and what llama.cpp alone asks for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import NormalDist

from headway.models.config import ModelConfig
from headway.models.description import GatedDelta, Mamba2, ShortConv

MetaItem = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]


def keys_of(c: ModelConfig) -> dict[str, MetaItem]:
    """What a config says, under the names that most families' files have; a file has those that its reader takes."""
    d, rope = c.description, c.rope
    windows = sorted({window for window in c.windows if isinstance(window, int)})
    keys: dict[str, MetaItem | None] = {
        "context_length": c.max_positions,
        "embedding_length": c.hidden_size,
        "block_count": c.layers,
        "feed_forward_length": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "attention.sliding_window": windows[0] if windows else None,
        "attention.sliding_window_pattern": [window is not None for window in c.windows] if windows else None,
        "attn_logit_softcapping": d.attention_cap,
        "final_logit_softcapping": d.logit_cap,
        "embedding_scale": d.embedding_scale,
        "attention.scale": d.attention_scale,
        "residual_scale": d.residual_scale,
        "logit_scale": 1 / d.logit_scale if c.family.startswith("granite") else d.logit_scale,
        "attention.clamp_kqv": d.qkv_clip,
        "use_parallel_residual": d.parallel,
    }
    if rope.dim:
        keys |= {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    local = [r.theta for r, window in zip(d.ropes or (), c.windows, strict=False) if window is not None and r.dim]
    keys["rope.freq_base_swa"] = local[0] if local else None
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.original_positions
    if (x := d.experts) is not None:
        keys |= {"expert_count": x.count, "expert_used_count": x.per_token, "expert_feed_forward_length": x.size}
        keys["expert_shared_feed_forward_length"] = x.shared_size or None
        keys["interleave_moe_layer_step"] = 1 + min(frozenset(range(c.layers)) - x.dense_layers)
    keys |= _latent(c) | _recurrent(c) | _by_layer(c)
    return {key: value for key, value in keys.items() if value is not None}


def unread_keys(c: ModelConfig) -> dict[str, MetaItem]:
    """What llama.cpp wants to be told and this package knows already."""
    match c.family:
        case "mamba2":
            return {"attention.head_count": 0, "feed_forward_length": 0}
        case "qwen3.5" | "qwen3.5-moe":  # pairs by time, height and width: one for text
            pairs = c.rope.dim // 2
            return {"rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]}
        case "gemma4" if c.description.per_layer is not None:
            return {"attention.value_length_swa": _dim(c, windowed=True)}
    return {}


def _latent(c: ModelConfig) -> dict[str, MetaItem | None]:
    how, x = c.description.latent, c.description.experts
    if how is None:
        return {}
    keys: dict[str, MetaItem | None] = {
        "attention.value_length": how.size,
        "attention.key_length_mla": how.query_dim,
        "attention.value_length_mla": how.value_dim,
        "attention.kv_lora_rank": how.size,
        "attention.q_lora_rank": how.query_size or None,
        "attention.scale": None,  # by the lengths, and by yarn
    }
    if c.rope.kind == "yarn":
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * c.rope.mscale_all_dim if c.rope.mscale_all_dim else None
    if x is None or x.groups is None:
        return keys
    keys["leading_dense_block_count"] = len(x.dense_layers)
    keys["expert_shared_count"] = x.shared_size // x.size
    keys["expert_weights_scale"], keys["expert_weights_norm"] = x.groups.scale, x.normalize
    keys["expert_gating_func"] = 2 if x.groups.score == "sigmoid" else 1
    return keys | {"expert_group_count": x.groups.count, "expert_group_used_count": x.groups.kept}


def _recurrent(c: ModelConfig) -> dict[str, MetaItem | None]:
    layers, how = c.recurrent_layers, c.description.recurrence
    if not layers:
        return {}
    by_layer = [0 if layer in layers else c.kv_heads for layer in range(c.layers)]
    every = next((layer + 1 for layer in range(c.layers) if layer not in layers), c.layers + 1)
    match how:
        case ShortConv(taps):
            return {"attention.head_count_kv": by_layer, "shortconv.l_cache": taps}
        case GatedDelta():
            keys = _ssm(how.taps, how.values, how.key_dim, how.value_heads, how.key_heads)
            return keys | {"full_attention_interval": every}
        case Mamba2():
            keys = _ssm(how.taps, how.inner, how.state_size, how.heads, how.groups)
            finetuned = None if c.family == "mamba2" else bool(c.rope.dim and c.description.ropes is None)
            keys |= {"rope.scaling.finetuned": finetuned}
            return keys if c.family == "mamba2" else keys | {"attention.head_count_kv": by_layer}
    return {}


def _ssm(taps: int, inner: int, state: int, heads: int, groups: int) -> dict[str, MetaItem | None]:
    return {
        "ssm.conv_kernel": taps,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }


def _by_layer(c: ModelConfig) -> dict[str, MetaItem | None]:
    own, altup = c.description.per_layer, c.description.altup
    if own is None:
        return {}
    keys: dict[str, MetaItem | None] = {
        "attention.head_count_kv": _one_or_all([shape.heads for shape in own.kv_shapes]),
        "feed_forward_length": _one_or_all(own.inners),
        "attention.shared_kv_layers": sum(source != layer for layer, source in enumerate(own.kv_from)),
        "embedding_length_per_layer_input": 0 if own.inputs is None else own.inputs.size,
    }
    if altup is not None:
        scales = [NormalDist().inv_cdf(share) if share else -inf for share in altup.sparsity]
        keys |= {"altup.num_inputs": altup.streams, "altup.active_idx": altup.active}
        return keys | {"activation_sparsity_scale": scales}
    whole, local = _dim(c, windowed=False), _dim(c, windowed=True)
    keys |= {"attention.key_length": whole, "attention.value_length": whole, "attention.key_length_swa": local}
    return keys | {"rope.dimension_count_swa": local}


def _one_or_all(sizes: Sequence[int]) -> MetaItem:
    """The size of every layer, or a list of them."""
    return sizes[0] if len(set(sizes)) == 1 else list(sizes)


def _dim(c: ModelConfig, *, windowed: bool) -> int:
    """The width of heads in layers with a window, or without one."""
    assert c.description.per_layer is not None
    shapes = zip(c.description.per_layer.kv_shapes, c.windows, strict=True)
    return next((shape.dim for shape, window in shapes if (window is not None) == windowed), c.head_dim)
