"""What a model is, read from config.json or GGUF metadata. The only reader of those keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, Unsupported
from headway.base.files import read_json
from headway.kernels.host.attention import ChunkWindow, Window
from headway.kernels.host.rope import Rope
from headway.models.description import PLAIN, Description, KvShape
from headway.models.families import FAMILIES, by_architecture, by_gguf
from headway.models.families.family import Family
from headway.models.families.windows import gguf_sizes
from headway.models.files.quantization import read_scheme
from headway.models.keys import LARGEST, Keys
from headway.models.nested import text_config
from headway.models.rope_keys import SHORT_FACTORS, gguf_rope, hf_rope, reach
from headway.models.weights import shapes

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


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder. `windows` has an entry per layer: its sliding window in positions, its chunk, or None.

    With latent attention all heads share one key head, of the width that a slot has in the KV cache; a value is part of
    its key.
    """

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
    windows: tuple[Window, ...]
    interleaved_weights: bool = False
    description: Description = PLAIN
    limit_reason: str = ""  # why there are fewer positions than the config says

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not 1 <= value <= LARGEST:
                raise BadModelFile(f"the model's {name} is {value}; it must be between 1 and {LARGEST}")
        if self.heads % self.kv_heads:
            raise BadModelFile(f"{self.heads} heads cannot share {self.kv_heads} key heads evenly")
        if self.head_dim % 2 and self.rope.dim:
            raise BadModelFile(f"the head size is {self.head_dim}; rotary positions need an even number")
        if self.rope.dim > self.head_dim:
            raise BadModelFile(f"{self.rope.dim} dimensions are rotated; a head has {self.head_dim}")
        if not 0 <= self.norm_eps < 1:
            raise BadModelFile(f"the norm's epsilon is {self.norm_eps}; it must be in [0, 1)")
        for window in self.windows:
            if isinstance(window, int) and window < 1:
                raise BadModelFile(f"a layer's sliding window is {window}; it must be at least 1")
            if isinstance(window, ChunkWindow) and window.size < 1:
                raise BadModelFile(f"a layer's attention chunk is {window.size}; it must be at least 1")
        self._check_layers()

    def _check_layers(self) -> None:
        """Raise unless what is said of each layer fits them."""
        ropes, own = self.description.ropes, self.description.per_layer
        if own is None:
            if ropes is not None and (len(ropes) != self.layers or any(r.dim not in (0, self.rope.dim) for r in ropes)):
                raise BadModelFile(f"{self.layers} layers need a rope each, of {self.rope.dim} dimensions or none")
            return
        assert ropes is not None
        for layer, (rope, shape, source) in enumerate(zip(ropes, own.kv_shapes, own.kv_from, strict=True)):
            if self.heads % shape.heads:
                raise BadModelFile(f"layer {layer}: {self.heads} heads cannot share {shape.heads} key heads evenly")
            if rope.dim > shape.dim or shape.dim % 2:
                raise BadModelFile(f"layer {layer}: {rope.dim} dimensions are rotated; a head has {shape.dim}")
            if source > layer or own.kv_from[source] != source or own.kv_shapes[source] != shape:
                raise BadModelFile(f"layer {layer} cannot attend to the keys and values of layer {source}")

    @property
    def kv_values_per_token(self) -> int:
        """Numbers per token in the KV cache, over all layers that have attention."""
        parts = 2 if self.description.latent is None else 1  # there a value is part of its key
        shapes = [self.kv_shape(layer) for layer in self.kv_layers]
        return parts * sum(shape.heads * shape.dim for shape in shapes)

    def kv_shape(self, layer: int) -> KvShape:
        """The keys of a slot in a layer."""
        own = self.description.per_layer
        return KvShape(self.kv_heads, self.head_dim) if own is None else own.kv_shapes[layer]

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own in the KV cache, in order."""
        own = self.description.per_layer
        return tuple(layer for layer in self.attention_layers if own is None or own.kv_from[layer] == layer)

    @cached_property
    def kv_places(self) -> tuple[int, ...]:
        """For each layer with attention, where the keys and values that it attends to are in the KV cache."""
        own, places = self.description.per_layer, self.kv_layers
        return tuple(places.index(layer if own is None else own.kv_from[layer]) for layer in self.attention_layers)

    def inner(self, layer: int) -> int:
        """The size of a layer's feed-forward."""
        own = self.description.per_layer
        return self.intermediate_size if own is None else own.inners[layer]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention, in order."""
        others = frozenset[int]() if self.description.both else self.description.recurrent_layers
        return tuple(layer for layer in range(self.layers) if layer not in others)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that have recurrent state, in order."""
        return tuple(sorted(self.description.recurrent_layers))

    @property
    def state_values(self) -> int:
        """Numbers of a sequence's recurrent state, over all layers; 0 for a model without recurrent layers."""
        how = self.description.recurrence
        return 0 if how is None else len(self.recurrent_layers) * how.state_values(self.hidden_size)

    @property
    def parameters(self) -> int:
        """The number of parameters (a tied head counted once)."""
        return shapes.parameters(self)

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses: those of its experts, and one row of an embedding that is not tied."""
        return shapes.parameters(self, active=True)

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied with before softmax."""
        scale = self.description.attention_scale
        return self.head_dim**-0.5 if scale is None else scale

    @property
    def rope_sets(self) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
        """The ropes that occur, and for each layer the number of its own, -1 for one that is not rotated."""
        ropes = self.description.ropes or (self.rope,) * self.layers
        sets = tuple(rope for rope in dict.fromkeys(ropes) if rope.dim)
        return sets, tuple(sets.index(rope) if rope.dim else -1 for rope in ropes)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The windows of a model without chunked attention."""
        assert not any(isinstance(window, ChunkWindow) for window in self.windows)
        return tuple(window for window in self.windows if not isinstance(window, ChunkWindow))

    def differences(self) -> tuple[str, ...]:
        """What is not as Llama has it, in words."""
        chunks = any(isinstance(window, ChunkWindow) for window in self.windows)
        return self.description.differences() + (("chunked attention",) if chunks else ())

    def first_layers(self, count: int) -> ModelConfig:
        """The config of a model of the first layers alone."""
        ropes, recurrent = self.description.ropes, self.description.recurrent_layers & frozenset(range(count))
        description = replace(
            self.description,
            ropes=None if ropes is None else ropes[:count],
            recurrence=self.description.recurrence if recurrent else None,
            recurrent_layers=recurrent,
            per_layer=self.description.per_layer and self.description.per_layer.first_layers(count),
            altup=self.description.altup and self.description.altup.first_layers(count),
        )
        return replace(self, layers=count, windows=self.windows[:count], description=description)


def read_config(path: Path) -> ModelConfig:
    """The config of a Hugging Face folder or a GGUF file."""
    if path.is_dir():
        return from_hf(read_json(path / "config.json", required=True))
    from headway.models.files.gguf import GgufFile

    with GgufFile.open(path) as file:
        return from_gguf(file.metadata, set(file.tensors))


def from_hf(data: Mapping[str, Any]) -> ModelConfig:
    """The config of a Hugging Face config.json, with current or older key names."""
    data = text_config(data)
    names = data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise BadModelFile(f"config.json: architectures is {names!r}; it must be a list with one name")
    family = by_architecture(names[0])
    _check_model_type(data, family)
    read_scheme(data)  # raises for one that is not supported
    keys = Keys({**family.defaults, **data}, "config.json", names=family.keys)
    heads, hidden, layers = (
        keys.int("num_attention_heads"),
        keys.int("hidden_size"),
        _layers(keys, "num_hidden_layers"),
    )
    if heads < 1:
        raise BadModelFile(f"config.json: {keys.name('num_attention_heads')} is {heads}; at least 1 is needed")
    head_dim = keys.int("head_dim", family.head_dim or hidden // heads)
    positions = keys.int("max_position_embeddings")
    rope = hf_rope(keys, head_dim, positions, family.theta, partial=family.partial, layers="full_attention")
    positions, limit_reason = reach(rope, positions)
    config = ModelConfig(
        family=family.name,
        vocab_size=keys.int("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_hf_kv_heads(keys, family, heads),
        head_dim=head_dim,
        intermediate_size=_hf_inner(keys, family, hidden),
        max_positions=positions,
        norm_eps=keys.float("rms_norm_eps", family.eps),
        rope=rope,
        tied=keys.bool("tie_word_embeddings", family.tied),
        qkv_bias=_flag(keys, family, family.qkv_bias),
        o_bias=_flag(keys, family, family.o_bias),
        mlp_bias=_flag(keys, family, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_hf_windows(keys, family, layers),
        interleaved_weights=family.interleaved_hf,
        limit_reason=limit_reason,
    )
    if family.describe is None:
        keys.check_silu(family.name)
    else:
        config = family.describe(keys, config)
    keys.check_all_understood(family.name)
    return config


def _check_model_type(data: Mapping[str, Any], family: Family) -> None:
    """Raise for a config whose architecture is one family's and whose model_type another's."""
    kind = data.get("model_type")
    other = next((f for f in FAMILIES if kind is not None and kind in f.model_types), family)
    if other is not family and kind not in family.model_types:
        raise BadModelFile(
            f"config.json: the architecture {data['architectures'][0]!r} is the {family.name} family's, and model_type "
            f"{kind!r} the {other.name} family's; the config mixes families"
        )


def from_gguf(metadata: Mapping[str, Any], tensors: set[str]) -> ModelConfig:
    """The config of a GGUF file, from its metadata and the names of its tensors."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise BadModelFile(f"GGUF: general.architecture is {arch!r}; it must be a name")
    family = by_gguf(arch, experts=bool(metadata.get(f"{arch}.expert_count")))
    keys = Keys(metadata, "GGUF", f"{arch}.", family.gguf_keys)
    heads, hidden, layers = keys.int("attention.head_count"), keys.int("embedding_length"), _layers(keys, "block_count")
    if heads < 1:
        raise BadModelFile(f"GGUF: {arch}.attention.head_count is {heads}; at least 1 is needed")
    head_dim = keys.int("attention.key_length", hidden // heads)
    if keys.int("attention.value_length", head_dim) != head_dim and not family.latent:
        raise Unsupported(f"GGUF: keys of size {head_dim} with values of another size are not supported")
    words = metadata.get("tokenizer.ggml.tokens")
    vocab = len(words) if isinstance(words, Sequence) and not isinstance(words, str) else None
    window = keys.int("attention.sliding_window", 0) or None
    has = tensors.__contains__
    rope = gguf_rope(keys, head_dim, family.theta, latent=family.latent, short_factors=SHORT_FACTORS in tensors)
    positions, limit_reason = reach(rope, keys.int("context_length"))
    config = ModelConfig(
        family=family.name,
        vocab_size=keys.int("vocab_size", vocab),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=max(gguf_sizes(keys, "attention.head_count_kv", layers))
        if family.gguf_by_layer
        else _gguf_kv_heads(keys, heads),
        head_dim=head_dim,
        intermediate_size=max(gguf_sizes(keys, "feed_forward_length", layers))
        if family.gguf_by_layer
        else keys.int("feed_forward_length"),
        max_positions=positions,
        norm_eps=keys.float("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied="output.weight" not in tensors,
        qkv_bias=any(map(has, ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))),
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias=any(map(has, ("blk.0.ffn_gate.bias", "blk.0.ffn_up.bias"))),
        qk_norm=family.qk_norm,
        windows=(window,) * layers,
        interleaved_weights=family.interleaved_gguf,
        limit_reason=limit_reason,
    )
    if family.describe_gguf is not None:
        config = family.describe_gguf(keys, config, tensors)
    keys.check_all_understood(family.name)
    return config


def _gguf_kv_heads(keys: Keys, heads: int) -> int:
    """The key heads of a layer; a list has 0 for layers without attention."""
    given = keys.get("attention.head_count_kv")
    if not isinstance(given, Sequence) or isinstance(given, str):
        return keys.int("attention.head_count_kv", heads)
    counts = {count for count in given if count != 0}
    if len(counts) > 1 or not all(type(count) is int for count in counts):
        raise Unsupported(
            f"GGUF: {keys.prefix}attention.head_count_kv is {list(given)!r}; layers with different numbers of key "
            "heads are not supported"
        )
    return counts.pop() if counts else heads


def _layers(keys: Keys, key: str) -> int:
    layers = keys.int(key)
    if not 1 <= layers <= 10_000:
        raise BadModelFile(f"{keys.source}: {keys.prefix}{key} is {layers}; it must be between 1 and 10000")
    return layers


def _hf_kv_heads(keys: Keys, family: Family, heads: int) -> int:
    """As many as heads if the config has null, the family's default if the key is missing."""
    silent = not keys.has("num_key_value_heads")
    return keys.int("num_key_value_heads", family.kv_heads if silent and family.kv_heads else heads)


def _hf_inner(keys: Keys, family: Family, hidden: int) -> int:
    """The size of feed-forwards; of a list with one for each layer, where a family has it, the largest."""
    given = keys.get("intermediate_size")
    if family.inner_by_layer and isinstance(given, list) and given and all(type(size) is int for size in given):
        return max(given)
    return keys.int("intermediate_size", family.inner and family.inner * hidden)


def _flag(keys: Keys, family: Family, flag: bool | str) -> bool:
    return keys.bool(flag, family.biased) if isinstance(flag, str) else flag


def _hf_windows(keys: Keys, family: Family, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, as the family reads the config."""
    silent = family.window == "given" if "sliding_window" not in keys.data else keys.get("sliding_window") is None
    if family.window == "none" or silent:
        return (None,) * layers
    window = keys.int("sliding_window", 4096)
    if family.window == "given":
        return (window,) * layers
    if family.window == "layers" and not keys.bool("use_sliding_window", False):
        return (None,) * layers
    kinds = keys.per_layer("layer_types", layers, {"sliding_attention": window, "full_attention": None})
    if kinds is None and family.window == "all":
        return (window,) * layers
    if kinds is not None:
        return kinds
    first = keys.int("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(layers))
