"""What a model is, read from config.json or GGUF metadata. The only reader of those keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.base.errors import BadModelFile, Unsupported
from headway.base.files import read_json
from headway.kernels.host.rope import Rope
from headway.models.families import by_architecture, by_gguf
from headway.models.families.family import Family

FINITE = sys.float_info.max
WHOLE = 1 << 63
LARGEST = 1 << 24  # larger than any dimension of a real model
SIZES = (
    "vocab_size",
    "hidden_size",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate_size",
    "max_positions",
)
# GGUF keys for rope variants that this decoder does not have, and the values that change nothing.
GGUF_ROPE_EXTRAS = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 0.0,
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder. `windows` has an entry per layer: its sliding window in positions, or None."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    interleaved_weights: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not 1 <= value <= LARGEST:
                raise BadModelFile(f"the model's {name} is {value}; it must be between 1 and {LARGEST}")
        if self.heads % self.kv_heads:
            raise BadModelFile(f"{self.heads} heads cannot share {self.kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise BadModelFile(f"the head size is {self.head_dim}; rotary positions need an even number")
        if self.rope.dim > self.head_dim:
            raise BadModelFile(f"{self.rope.dim} dimensions are rotated; a head has {self.head_dim}")
        if not 0 <= self.norm_eps < 1:
            raise BadModelFile(f"the norm's epsilon is {self.norm_eps}; it must be in [0, 1)")
        for window in self.windows:
            if window is not None and window < 1:
                raise BadModelFile(f"a layer's sliding window is {window}; it must be at least 1")

    @property
    def kv_values_per_token(self) -> int:
        """Numbers per token in the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """The number of parameters (a tied head counted once)."""
        e, f, d = self.hidden_size, self.intermediate_size, self.head_dim
        attention = 2 * e * d * (self.heads + self.kv_heads)
        biases = self.qkv_bias * d * (self.heads + 2 * self.kv_heads) + self.o_bias * e + self.mlp_bias * (2 * f + e)
        layer = attention + 3 * e * f + 2 * e + biases + self.qk_norm * 2 * d
        return self.vocab_size * e * (1 if self.tied else 2) + self.layers * layer + e


def read_config(path: Path) -> ModelConfig:
    """The config of a Hugging Face folder or a GGUF file."""
    if path.is_dir():
        return from_hf(read_json(path / "config.json", required=True))
    from headway.models.files.gguf import GgufFile

    with GgufFile.open(path) as file:
        return from_gguf(file.metadata, set(file.tensors))


class _Keys:
    """Typed access to one source of keys, with errors that name the key."""

    def __init__(self, data: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.data, self.source, self.prefix = data, source, prefix

    def get(self, key: str) -> Any:
        return self.data.get(self.prefix + key)

    def int(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not -WHOLE <= value < WHOLE:
            raise BadModelFile(f"{self.source}: {self.prefix}{key} is {value!r}; it must be an integer")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= FINITE:
            raise BadModelFile(f"{self.source}: {self.prefix}{key} is {value!r}; it must be a finite number")
        return float(value)

    def optional(self, key: str) -> float | None:
        return None if self.get(key) is None else self.float(key)

    def bool(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise BadModelFile(f"{self.source}: {self.prefix}{key} is {value!r}; it must be true or false")
        return value

    def _default(self, key: str, default: Any) -> Any:
        if default is None:
            raise BadModelFile(f"{self.source} has no key {self.prefix}{key!r}, which this architecture needs")
        return default


def from_hf(data: Mapping[str, Any]) -> ModelConfig:
    """The config of a Hugging Face config.json, with current or older key names."""
    names = data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise BadModelFile(f"config.json: architectures is {names!r}; it must be a list with one name")
    family = by_architecture(names[0])
    keys = _Keys(data, "config.json")
    act = data.get("hidden_act", "silu")
    if act != "silu":
        raise Unsupported(f"config.json: hidden_act is {act!r}; only silu is supported")
    heads, hidden, layers = (
        keys.int("num_attention_heads"),
        keys.int("hidden_size"),
        _layers(keys, "num_hidden_layers"),
    )
    if heads < 1:
        raise BadModelFile(f"config.json: num_attention_heads is {heads}; at least 1 is needed")
    head_dim = keys.int("head_dim", family.head_dim or hidden // heads)
    positions = keys.int("max_position_embeddings")
    return ModelConfig(
        family=family.name,
        vocab_size=keys.int("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_hf_kv_heads(keys, family, heads),
        head_dim=head_dim,
        intermediate_size=keys.int("intermediate_size"),
        max_positions=positions,
        norm_eps=keys.float("rms_norm_eps"),
        rope=_hf_rope(data, head_dim, positions, family.theta),
        tied=keys.bool("tie_word_embeddings", False),
        qkv_bias=_flag(keys, family.qkv_bias),
        o_bias=_flag(keys, family.o_bias),
        mlp_bias=_flag(keys, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_hf_windows(keys, family, layers),
    )


def from_gguf(metadata: Mapping[str, Any], tensors: set[str]) -> ModelConfig:
    """The config of a GGUF file, from its metadata and the names of its tensors."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise BadModelFile(f"GGUF: general.architecture is {arch!r}; it must be a name")
    family = by_gguf(arch)
    keys = _Keys(metadata, "GGUF", f"{arch}.")
    heads, hidden, layers = keys.int("attention.head_count"), keys.int("embedding_length"), _layers(keys, "block_count")
    if heads < 1:
        raise BadModelFile(f"GGUF: {arch}.attention.head_count is {heads}; at least 1 is needed")
    head_dim = keys.int("attention.key_length", hidden // heads)
    if keys.int("attention.value_length", head_dim) != head_dim:
        raise Unsupported(f"GGUF: keys of size {head_dim} with values of another size are not supported")
    words = metadata.get("tokenizer.ggml.tokens")
    vocab = len(words) if isinstance(words, list) else None
    window = keys.int("attention.sliding_window", 0) or None
    return ModelConfig(
        family=family.name,
        vocab_size=keys.int("vocab_size", vocab),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=keys.int("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=keys.int("feed_forward_length"),
        max_positions=keys.int("context_length"),
        norm_eps=keys.float("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(keys, head_dim, family),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=family.qk_norm,
        windows=(window,) * layers,
        interleaved_weights=family.interleaved_gguf,
    )


def _layers(keys: _Keys, key: str) -> int:
    layers = keys.int(key)
    if not 1 <= layers <= 10_000:
        raise BadModelFile(f"{keys.source}: {keys.prefix}{key} is {layers}; it must be between 1 and 10000")
    return layers


def _hf_kv_heads(keys: _Keys, family: Family, heads: int) -> int:
    """As many as heads if the config has null, the family's default if the key is missing."""
    silent = "num_key_value_heads" not in keys.data
    return keys.int("num_key_value_heads", family.kv_heads if silent and family.kv_heads else heads)


def _flag(keys: _Keys, flag: bool | str) -> bool:
    return keys.bool(flag, False) if isinstance(flag, str) else flag


def _hf_windows(keys: _Keys, family: Family, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, as the family reads the config."""
    if family.window == "none" or ("sliding_window" in keys.data and keys.get("sliding_window") is None):
        return (None,) * layers
    window = keys.int("sliding_window", 4096)
    if family.window == "all":
        return (window,) * layers
    if not keys.bool("use_sliding_window", False):
        return (None,) * layers
    kinds = keys.get("layer_types")
    if kinds is None:
        first = keys.int("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in list(known) for k in kinds):
        raise BadModelFile(
            f"config.json: layer_types must name one of {', '.join(known)} for each of {layers} layers, not {kinds!r}"
        )
    return tuple(known[k] for k in kinds)


def _hf_rope(data: Mapping[str, Any], head_dim: int, positions: int, theta: float) -> Rope:
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise BadModelFile(f"config.json: the rope parameters are {scaling!r}; they must be an object")
    keys = _Keys(scaling, "config.json, rope parameters")
    theta = keys.float("rope_theta", _Keys(data, "config.json").float("rope_theta", theta))
    partial = keys.float("partial_rotary_factor", _Keys(data, "config.json").float("partial_rotary_factor", 1.0))
    if not 0 < partial <= 1:
        raise BadModelFile(f"config.json: partial_rotary_factor is {partial}; it must be above 0 and at most 1")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if data.get("original_max_position_embeddings") is not None:  # the top level wins, as in transformers
        keys.data = {**scaling, "original_max_position_embeddings": data["original_max_position_embeddings"]}
    return _rope(keys, kind, int(head_dim * partial), theta, positions)


def _rope(keys: _Keys, kind: str, dim: int, theta: float, positions: int) -> Rope:
    if theta <= 1:
        raise BadModelFile(f"{keys.source}: rope theta is {theta}; it must be above 1")
    if dim < 2 or dim % 2:
        raise BadModelFile(f"{keys.source}: {dim} rotated dimensions; it must be an even number of at least 2")
    match kind:
        case "default":
            return Rope(dim, theta)
        case "linear":
            return Rope(dim, theta, "linear", factor=_positive(keys, "factor"))
        case "llama3":
            low, high = _positive(keys, "low_freq_factor"), _positive(keys, "high_freq_factor")
            if low >= high:
                raise BadModelFile(f"{keys.source}: low_freq_factor {low} must be below high_freq_factor {high}")
            return Rope(
                dim,
                theta,
                "llama3",
                factor=_positive(keys, "factor"),
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
                factor=_positive(keys, "factor", positions / original),
                original_positions=original,
                beta_fast=_positive(keys, "beta_fast", 32.0),
                beta_slow=_positive(keys, "beta_slow", 1.0),
                attention_factor=keys.optional("attention_factor"),
                mscale=keys.optional("mscale"),
                mscale_all_dim=keys.optional("mscale_all_dim"),
                truncate=keys.bool("truncate", True),
            )
    raise Unsupported(f"{keys.source}: rope type {kind!r} is not supported; use default, linear, llama3 or yarn")


def _original(keys: _Keys, default: int | None) -> int:
    key = "original_max_position_embeddings"
    value = keys.int(key, default)
    if not 1 <= value <= LARGEST:
        raise BadModelFile(f"{keys.source}: {key} is {value}; it must be between 1 and {LARGEST}")
    return value


def _positive(keys: _Keys, key: str, default: float | None = None) -> float:
    value = keys.float(key, default)
    if not 0 < value <= LARGEST:
        raise BadModelFile(f"{keys.source}: {key} is {value}; it must be above 0 and at most {LARGEST}")
    return value


def _gguf_rope(keys: _Keys, head_dim: int, family: Family) -> Rope:
    dim = keys.int("rope.dimension_count", head_dim)
    theta = keys.float("rope.freq_base", family.theta)
    for key, plain in GGUF_ROPE_EXTRAS.items():
        if (value := keys.get(key)) is not None and value != plain:
            raise Unsupported(f"GGUF: {keys.prefix}{key} is {value!r}; only {plain}, or no such key, is supported")
    kind = keys.get("rope.scaling.type") or "default"
    if kind in ("default", "none"):
        return _rope(keys, "default", dim, theta, 0)
    renamed = {
        "factor": keys.get("rope.scaling.factor"),
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    return _rope(_Keys(renamed, "GGUF, rope scaling"), kind, dim, theta, keys.int("context_length"))
