"""A Hugging Face folder as a GGUF file has it: names, layouts and metadata by the family's description of such files.

What would be written is read back before a byte is: a folder whose config a GGUF file cannot say is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.errors import HeadwayError, Unsupported
from headway.models.config import ModelConfig, from_gguf
from headway.models.families import by_gguf, by_name
from headway.models.families.family import Cut, Family, FirstOf, Part
from headway.models.files.weights import Weights
from headway.models.weights.load import folder_array
from headway.models.weights.roles import FREQUENCIES, GGUF_NAMES, GGUF_PARTS, Roles
from headway.models.weights.rows import half_split
from headway.models.weights.shapes import layer_shapes, model_shapes

MetaItem = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]
LLAMA_FILES = {"mistral": "llama"}  # families whose files say another's architecture


class FolderAsGguf:
    """The tensors and the metadata that the GGUF file of a folder has."""

    def __init__(self, path: Path, config: ModelConfig, weights: Weights, vocabulary: Mapping[str, MetaItem]) -> None:
        self._roles = Roles.of(path, config, weights)
        self._roles.check()
        self._family = _family_of(path, config)
        self._config, self._weights = config, weights
        self._parts: dict[str, list[tuple[str, str, tuple[int, ...], Part]]] = {}  # name → role, at, shape, where
        for at, mine, shapes in self._places():
            for role, shape in shapes.items():
                part = self._part(role)
                name = mine + (part.name if isinstance(part, Cut) else _one(part, config))
                self._parts.setdefault(name, []).append((role, at, shape, part))
        self.metadata = _metadata(path, config, self._family, frozenset(self.names())) | dict(vocabulary)

    def names(self) -> tuple[str, ...]:
        scaled = (FREQUENCIES,) if self._config.rope.kind == "llama3" else ()
        return (*self._parts, *scaled)

    def shape(self, name: str) -> tuple[int, ...]:
        if name == FREQUENCIES:
            return (self._config.rope.dim // 2,)
        (_, _, shape, part), *_ = self._parts[name]
        return part.shape(self._config) if isinstance(part, Cut) else shape

    def stored(self, name: str) -> str:
        """What a tensor is before it is quantized."""
        return "F32"

    def array(self, name: str) -> np.ndarray:
        """The tensor in float32."""
        if name == FREQUENCIES:
            return _divisors(self._config)
        parts = self._parts[name]
        role, at, shape, part = parts[0]
        if not isinstance(part, Cut):
            return self._values(role, at, shape)
        out = np.empty(part.shape(self._config), np.float32)
        for role, at, shape, part in parts:
            assert isinstance(part, Cut)
            out[part.take(np.arange(len(out)), self._config)] = self._values(role, at, shape)
        return out

    def _places(self) -> Iterator[tuple[str, str, dict[str, tuple[int, ...]]]]:
        yield "", "", model_shapes(self._config)
        for i in range(self._config.layers):
            yield self._roles.layer(i), f"blk.{i}.", layer_shapes(self._config, i)

    def _part(self, role: str) -> Part:
        whole = {r: n if n.endswith((".weight", ".")) else f"{n}.weight" for r, n in GGUF_NAMES.items()}
        parts: dict[str, Part] = {**whole, **GGUF_PARTS, **self._family.gguf_parts}
        return Roles(self._config, self._weights, parts, frozenset(), gguf=True).part(role)

    def _values(self, role: str, at: str, shape: tuple[int, ...]) -> np.ndarray:
        values, c = folder_array(self._roles, role, shape, at), self._config
        if c.description.norm == "rms+1" and role.endswith("_norm"):
            values = values + np.float32(1)
        pairs = self._family.interleaved_gguf and not c.interleaved_weights
        if pairs and role.removesuffix("_bias") in ("q", "k"):
            moved = np.empty_like(values)
            moved[half_split(np.arange(len(values)), c.head_dim, c.rope.dim)] = values
            return moved
        return values


def _family_of(path: Path, config: ModelConfig) -> Family:
    family = by_name(LLAMA_FILES.get(config.family, config.family))
    other_order = config.interleaved_weights and not family.interleaved_gguf
    own_layers = config.description.latent or config.description.per_layer or config.recurrent_layers
    if family.gguf is None or other_order or own_layers:
        raise Unsupported(f"{path} is a {config.family} model, of which no GGUF file is written; use int8, int4 or fp8")
    return by_gguf(family.gguf, experts=config.description.experts is not None)


def _one(part: Part, config: ModelConfig) -> str:
    if isinstance(part, FirstOf):
        return part.names[-1 if config.description.one_norm else 0]
    assert isinstance(part, str)
    return part


def _metadata(path: Path, config: ModelConfig, family: Family, names: frozenset[str]) -> dict[str, MetaItem]:
    """The keys that this family's files have: those that are read. Read back, they must give the config."""
    arch = family.gguf
    all_keys = {f"{arch}.{family.gguf_keys.get(key, key)}": value for key, value in _keys(config).items()}
    all_keys["general.architecture"] = str(arch)
    seen = _Seen(all_keys)
    with suppress(HeadwayError):  # a key of another family: those that were read are kept
        from_gguf(seen, set(names))
    needed = {f"{arch}.vocab_size", f"{arch}.context_length"}
    kept = {key: value for key, value in all_keys.items() if key in seen.read | needed}
    _check_same(path, config, from_gguf(kept, set(names)))
    return kept


class _Seen(dict[str, Any]):
    """Metadata that notes which keys are read."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _keys(c: ModelConfig) -> dict[str, MetaItem]:
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
    return {key: value for key, value in keys.items() if value is not None}


def _check_same(path: Path, wanted: ModelConfig, written: ModelConfig) -> None:
    """Raise unless two configs compute the same; norms may count from 1, and rows have an order of their own."""
    how, there = (replace(c.description, attention_scale=c.attention_scale) for c in (wanted, written))
    how = replace(how, norm="rms" if how.norm == "rms+1" else how.norm)
    if wanted.rope.kind == "llama3":  # said by a tensor
        ropes = how.ropes and tuple(written.rope if rope == wanted.rope else rope for rope in how.ropes)
        wanted, how = replace(wanted, rope=written.rope), replace(how, ropes=ropes)
    for ours, theirs in ((wanted, written), (how, there)):
        for each in fields(ours):
            one, other = getattr(ours, each.name), getattr(theirs, each.name)
            if each.name not in ("family", "interleaved_weights", "description") and not _equal(one, other):
                raise Unsupported(
                    f"{path}: a GGUF file of the {written.family} family cannot say that {each.name} is {one!r}, and "
                    f"would mean {other!r}; use int8, int4 or fp8"
                )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return one == other


def _divisors(c: ModelConfig) -> np.ndarray:
    """What each frequency of a plain rope is divided by."""
    from headway.kernels.host.rope import Rope, frequencies

    return (frequencies(Rope(c.rope.dim, c.rope.theta)) / frequencies(c.rope)).astype(np.float32)
