"""A Hugging Face folder as a GGUF file has it: names, layouts and metadata by the family's description of such files.

What would be written is read back before a byte is: a folder whose config a GGUF file cannot say is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.errors import HeadwayError, Unsupported
from headway.models.config import ModelConfig, from_gguf
from headway.models.description import GatedDelta
from headway.models.families import by_gguf, by_name
from headway.models.families.family import Cut, Family, FirstOf, Part
from headway.models.files.mxfp4_folder import Mxfp4Folder
from headway.models.files.weights import Weights
from headway.models.quantized.gguf_keys import MetaItem, keys_of, unread_keys
from headway.models.weights.load import folder_array, folder_fp4
from headway.models.weights.roles import FREQUENCIES, GGUF_NAMES, GGUF_PARTS, Roles
from headway.models.weights.rows import half_split
from headway.models.weights.shapes import has_experts, layer_shapes, model_shapes

BY_VALUE_HEAD = ("mix_gate", "mix_beta", "mix_step", "step_bias", "rate", "mix_out")
TOKEN_INPUTS = GGUF_PARTS["token_inputs"]
STILL = 1e30  # the divisor of a frequency that is none
TURNED = ("gemma4",)  # families whose files say which pairs of a rope are rotated
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
        scaled = self._config.rope.kind == "llama3" or self._config.family in TURNED
        return (*self._parts, *((FREQUENCIES,) if scaled else ()))

    def shape(self, name: str) -> tuple[int, ...]:
        if name == FREQUENCIES:
            return (self._config.rope.dim // 2,)
        (_, _, shape, part), *_ = self._parts[name]
        if name == TOKEN_INPUTS:
            return self._config.vocab_size, shape[1]
        return part.shape(self._config) if isinstance(part, Cut) else shape

    def stored(self, name: str) -> str:
        """What a tensor is before it is quantized: MXFP4 stays so."""
        return "MXFP4" if self._in_fp4(name) else "F32"

    def fp4_blocks(self, name: str) -> np.ndarray:
        """The bytes of a tensor in MXFP4: for 32 numbers a scale, and the first half in the low bits of the second."""
        (role, at, _, _), *_ = self._parts[name]
        parts = folder_fp4(self._roles, role, at)
        assert parts is not None
        quants = parts.quants.reshape(-1, 2, 16)
        return np.concatenate([parts.scale.reshape(-1, 1), quants[:, 0] | quants[:, 1] << 4], 1)

    def _in_fp4(self, name: str) -> bool:
        if name == FREQUENCIES or not isinstance(self._weights, Mxfp4Folder):
            return False
        (role, at, _, _), *_ = self._parts[name]
        part = self._roles.part(role)
        return isinstance(part, Cut) and self._weights.is_quantized(at + part.name)

    def array(self, name: str) -> np.ndarray:
        """The tensor in float32."""
        if name == FREQUENCIES:
            return _divisors(self._config)
        parts = self._parts[name]
        role, at, shape, part = parts[0]
        if name == TOKEN_INPUTS:  # tokens without a row have that of the first one
            table, (count, _) = self._values(role, at, shape), self.shape(name)
            return table if len(table) == count else table[np.arange(count) * (np.arange(count) < len(table))]
        if not isinstance(part, Cut):
            return self._values(role, at, shape)
        out = np.empty(part.shape(self._config), np.float32)
        for role, at, shape, part in parts:
            assert isinstance(part, Cut)
            values = self._values(role, at, shape)
            cells = out.shape if values.ndim == 1 else out.shape[:-1]  # numbers, or rows
            rows = out.reshape(-1, 1 if values.ndim == 1 else out.shape[-1])
            places = part.take(np.arange(len(rows)).reshape(cells), self._config)
            rows[places.ravel()] = values.reshape(len(places.ravel()), -1)
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
        if c.description.norm == "rms+1" and role.endswith("_norm") and role != "mix_norm":
            values = values + np.float32(1)
        if self._family.cycled_gguf:
            return by_turns(role, values, c)
        pairs = self._family.interleaved_gguf and not c.interleaved_weights
        if pairs and role.removesuffix("_bias") in ("q", "k"):
            moved = np.empty_like(values)
            moved[half_split(np.arange(len(values)), c.head_dim, c.rope.dim)] = values
            return moved
        return values


def _family_of(path: Path, config: ModelConfig) -> Family:
    family = by_name(LLAMA_FILES.get(config.family, config.family))
    other_order = config.interleaved_weights and not family.interleaved_gguf
    if family.gguf is None or other_order:
        raise Unsupported(f"{path} is a {config.family} model, of which no GGUF file is written; use int8, int4 or fp8")
    return by_gguf(family.gguf, experts=config.description.experts is not None)


def by_turns(role: str, values: np.ndarray, c: ModelConfig) -> np.ndarray:
    """A weight of a gated delta net with the first value head of every key head first, then the second ones."""
    how = c.description.recurrence
    if not isinstance(how, GatedDelta) or role not in ("mix_qkv", "conv", *BY_VALUE_HEAD):
        return values
    heads = np.arange(how.value_heads).reshape(how.key_heads, -1).T.ravel()
    if role in ("mix_beta", "mix_step", "step_bias", "rate"):
        return values[heads]
    numbers = (heads[:, None] * how.value_dim + np.arange(how.value_dim)).ravel()
    if role == "mix_out":
        return values[:, numbers]
    before = len(values) - len(numbers)  # queries and keys
    return np.concatenate([values[:before], values[before + numbers]])


def _one(part: Part, config: ModelConfig) -> str:
    if isinstance(part, FirstOf):
        return part.names[-1 if config.description.one_norm else 0]
    assert isinstance(part, str)
    return part


def _metadata(path: Path, config: ModelConfig, family: Family, names: frozenset[str]) -> dict[str, MetaItem]:
    """The keys that this family's files have: those that are read. Read back, they must give the config."""
    arch = family.gguf
    all_keys = {f"{arch}.{family.gguf_keys.get(key, key)}": value for key, value in keys_of(config).items()}
    all_keys["general.architecture"] = str(arch)
    seen = _Seen(all_keys)
    with suppress(HeadwayError):  # a key of another family: those that were read are kept
        from_gguf(seen, set(names))
    needed = {f"{arch}.vocab_size", f"{arch}.context_length"}
    kept = {key: value for key, value in all_keys.items() if key in seen.read | needed}
    _check_same(path, config, from_gguf(kept, set(names)))
    return kept | {f"{arch}.{key}": value for key, value in unread_keys(config).items()}


class _Seen(dict[str, Any]):
    """Metadata that notes which keys are read."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _check_same(path: Path, wanted: ModelConfig, written: ModelConfig) -> None:
    """Raise unless two configs compute the same."""
    wanted = _as_written(wanted, written)
    how, there = (replace(c.description, attention_scale=c.attention_scale) for c in (wanted, written))
    for ours, theirs in ((wanted, written), (how, there)):
        for each in fields(ours):
            one, other = getattr(ours, each.name), getattr(theirs, each.name)
            if each.name not in ("family", "interleaved_weights", "description") and not _equal(one, other):
                raise Unsupported(
                    f"{path}: a GGUF file of the {written.family} family cannot say that {each.name} is {one!r}, and "
                    f"would mean {other!r}; use int8, int4 or fp8"
                )


def _as_written(c: ModelConfig, written: ModelConfig) -> ModelConfig:
    """A config with what a file has otherwise and means the same: norms that count from 1, rows with an order of their
    own, a scaled rope, a size that no layer has, tables with other rows at the end."""
    how, rope = c.description, c.rope
    how = replace(how, norm="rms" if how.norm == "rms+1" else how.norm)
    if isinstance(how.recurrence, GatedDelta) and by_name(written.family).cycled_gguf:
        how = replace(how, recurrence=replace(how.recurrence, cycled=True))
    if written.family in TURNED and (rope.dim, rope.theta) == (written.rope.dim, written.rope.theta):
        rope = written.rope if rope.kind in ("default", "proportional") else rope  # a tensor says how much
    if rope.kind != "yarn":
        rope = replace(rope, truncate=written.rope.truncate)
    if rope.kind == "llama3":  # said by a tensor
        rope = written.rope
    if how.latent is not None and rope.kind == "yarn" and rope.scale == 1:  # scores are scaled, not the rotation
        there = written.rope.mscale_all_dim
        rope = replace(rope, attention_factor=written.rope.attention_factor, mscale=written.rope.mscale)
        rope = replace(rope, mscale_all_dim=there) if _equal(rope.mscale_all_dim, there) else rope
    if how.ropes is not None:
        how = replace(how, ropes=tuple(rope if each == c.rope else each for each in how.ropes))
    own, altup, theirs = how.per_layer, how.altup, written.description
    if own is not None and own.inputs is not None and theirs.per_layer is not None:  # the table is as long as the other
        how = replace(how, per_layer=replace(own, inputs=replace(own.inputs, vocab=c.vocab_size)))
    if altup is not None and theirs.altup is not None and np.allclose(altup.sparsity, theirs.altup.sparsity, atol=1e-6):
        how = replace(how, altup=replace(altup, sparsity=theirs.altup.sparsity))
    dense = not how.no_feed_forward and any(not has_experts(c, layer) for layer in range(c.layers))
    size = c.intermediate_size if dense and own is None else written.intermediate_size  # else said by layer
    return replace(c, description=how, rope=rope, intermediate_size=size)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return one == other


def _divisors(c: ModelConfig) -> np.ndarray:
    """What each frequency of a plain rope is divided by: much, where a pair is not rotated."""
    from headway.kernels.host.rope import Rope, frequencies

    ours = frequencies(c.rope)
    with np.errstate(divide="ignore"):
        divisors = frequencies(Rope(c.rope.dim, c.rope.theta)) / ours
    return np.where(ours > 0, divisors, STILL).astype(np.float32)
