"""Weight files to a QuantizedDecoder: names, shapes, layout. Errors name a weight that is missing, extra or misshapen.

`load_tensors` makes a Decoder of torch from the same files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.base.arrays import aligned
from headway.base.errors import BadModelFile, Unsupported
from headway.kernels.host.quantized import QuantizedMatrix
from headway.kernels.host.rope import frequencies
from headway.kernels.native.library import ThreadPool
from headway.models.config import ModelConfig, read_config
from headway.models.files.blocks import FLOATS
from headway.models.files.weights import Weights, open_weights
from headway.models.quantized.cache import WeightCache, cache_key
from headway.models.quantized.cpu import QuantizedDecoder, QuantizedLayer
from headway.models.quantized.repack import load_matrix
from headway.models.rows import half_split

LoadProgress = Callable[[int, int], None]  # layers done, total layers

HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "output": "lm_head.weight",
    "layer": "model.layers.{}.",
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "output": "output.weight",
    "layer": "blk.{}.",
    "input_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# Tensors that carry nothing the config does not say.
HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|lm_head\.weight")


def load_quantized_model(
    path: Path,
    *,
    thread_pool: ThreadPool | None,
    keep: bool = True,
    quantize: str | None = None,
    progress: LoadProgress | None = None,
    cache: WeightCache | None = None,
) -> QuantizedDecoder:
    """The decoder for the CPU's native step, or for its torch reference, which has no thread pool.

    `keep` leaves each matrix in its stored type, else it becomes float32.

    `quantize` is for float matrices: int8, or int4 (with the embedding and the output in int8). `cache` keeps what
    repacking has made.
    """
    config, weights = read_config(path), open_weights(path)
    try:
        reader = NamedWeights(config, weights, names_in(path), set())
        if quantize is not None and keep:
            _check_floats(path, weights, quantize)
        key = None if cache is None else cache_key(path, weights, keep=keep, quantize=quantize)
        if cache is not None and key is not None and (kept := cache.load(key, config)) is not None:
            return kept
        decoder = _QuantizedReader(reader, thread_pool, keep, quantize).decoder(progress)
        reader.check_all_used()
        if cache is not None and key is not None:
            cache.store(key, decoder)
        return decoder
    finally:
        weights.close()


def has_quantized(path: Path) -> bool:
    """Whether a model's file has quantized matrices."""
    with open_weights(path) as weights:
        return any(len(weights.shape(name)) == 2 and weights.stored(name) not in FLOATS for name in weights.names())


def stored_dtype(path: Path) -> str | None:
    """The float type of all matrices in a model's files; None if they are quantized or of several types."""
    with open_weights(path) as weights:
        kinds = {weights.stored(name) for name in weights.names() if len(weights.shape(name)) == 2}
    return FLOATS.get(kinds.pop()) if len(kinds) == 1 else None


def check_weight(weights: Weights, names: Collection[str], name: str, shape: tuple[int, ...]) -> None:
    """Raise if a weight is missing or has another shape."""
    if name not in names:
        raise BadModelFile(f"the weight {name!r} is missing; this config needs it with shape {list(shape)}")
    stored = tuple(weights.shape(name))
    if stored != shape:
        raise BadModelFile(f"the weight {name!r} has shape {list(stored)}; this config needs {list(shape)}")


def check_all_used(weights: Weights, used: Collection[str], family: str, ignored: str | None = None) -> None:
    """Raise if there are weights that nobody has asked for, and that no pattern ignores."""
    extra = sorted(n for n in weights.names() if n not in used and not HARMLESS.fullmatch(n))
    extra = [n for n in extra if ignored is None or not re.fullmatch(ignored, n)]
    if extra:
        raise BadModelFile(
            f"{len(extra)} weights do not belong to this {family} config, such as {extra[0]!r}; "
            "the config and the weights belong to different models"
        )


def _check_floats(path: Path, weights: Weights, quantize: str) -> None:
    """Raise if there is nothing to quantize: matrices quantized in the file stay as they are."""
    stored = {weights.stored(name) for name in weights.names() if len(weights.shape(name)) == 2}
    if not stored & FLOATS.keys():
        raise Unsupported(
            f"quantize={quantize!r} is for float matrices, and {path.name} has only {', '.join(sorted(stored))}, "
            "which stay as they are; leave it out, or add dtype='float32' to dequantize them first"
        )


def names_in(path: Path) -> dict[str, str]:
    """What the weights are called: in a GGUF file, or in a Hugging Face folder."""
    return GGUF_NAMES if path.is_file() else HF_NAMES


@dataclass(frozen=True, eq=False)
class NamedWeights:
    """A model's weights by name, and which of them were used."""

    config: ModelConfig
    weights: Weights
    names: dict[str, str]
    used: set[str]

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A weight in float32."""
        self.claim(name, shape)
        return aligned(self.weights.array(name))

    def claim(self, name: str, shape: tuple[int, ...]) -> None:
        """Mark a weight as used; raise if it is missing or has another shape."""
        check_weight(self.weights, self.weights.names(), name, shape)
        self.used.add(name)

    def check_all_used(self) -> None:
        check_all_used(self.weights, self.used, self.config.family)

    def frequencies(self) -> np.ndarray:
        """Rotation frequencies; a GGUF file may carry a divisor for each (`rope_freqs`)."""
        inv_freq, name = frequencies(self.config.rope), "rope_freqs.weight"
        if self.names is GGUF_NAMES and name in self.weights.names():
            self.used.add(name)
            if self.weights.shape(name) != inv_freq.shape:
                raise BadModelFile(
                    f"the weight {name!r} has shape {list(self.weights.shape(name))}; "
                    f"this config needs {list(inv_freq.shape)}"
                )
            inv_freq = inv_freq / self.weights.array(name)
        return aligned(inv_freq)


@dataclass(frozen=True, eq=False)
class _QuantizedReader:
    """Reads the same weights as `QuantizedMatrix`."""

    reader: NamedWeights
    thread_pool: ThreadPool | None
    keep: bool
    quantize: str | None

    def decoder(self, progress: LoadProgress | None) -> QuantizedDecoder:
        reader, c, names = self.reader, self.reader.config, self.reader.names
        table = (c.vocab_size, c.hidden_size)
        coarse = None if self.quantize is None else "int8"  # every token passes through these: keep more precision
        embedding = self.matrix(names["embedding"], table, quantize=coarse)
        layers = []
        for i in range(c.layers):
            layers.append(self.layer(i))
            if progress is not None:
                progress(i + 1, c.layers)
        return QuantizedDecoder(
            config=c,
            embedding=embedding,
            layers=tuple(layers),
            final_norm=reader.array(names["final_norm"], (c.hidden_size,)),
            output=embedding if c.tied else self.matrix(names["output"], table, quantize=coarse),
            inv_freq=reader.frequencies(),
        )

    def layer(self, i: int) -> QuantizedLayer:
        c, n, reader = self.reader.config, self.reader.names, self.reader
        at = n["layer"].format(i)
        e, f, d, q, kv = c.hidden_size, c.intermediate_size, c.head_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim
        return QuantizedLayer(
            input_norm=reader.array(at + n["input_norm"], (e,)),
            mlp_norm=reader.array(at + n["mlp_norm"], (e,)),
            q_norm=reader.array(at + n["q_norm"], (d,)) if c.qk_norm else None,
            k_norm=reader.array(at + n["k_norm"], (d,)) if c.qk_norm else None,
            q=self.part(at, "q", (q, e), c.qkv_bias),
            k=self.part(at, "k", (kv, e), c.qkv_bias),
            v=self.part(at, "v", (kv, e), c.qkv_bias),
            o=self.part(at, "o", (e, q), c.o_bias),
            gate=self.part(at, "gate", (f, e), c.mlp_bias),
            up=self.part(at, "up", (f, e), c.mlp_bias),
            down=self.part(at, "down", (e, f), c.mlp_bias),
        )

    def part(self, at: str, role: str, shape: tuple[int, int], bias: bool) -> QuantizedMatrix:
        rows = None
        if role in ("q", "k") and self.reader.config.interleaved_weights:
            rows = half_split(np.arange(shape[0]), self.reader.config.head_dim)
        name = at + self.reader.names[role]
        values = self.reader.array(f"{name}.bias", shape[:1]) if bias else None
        if values is not None and rows is not None:
            values = values[rows]
        return self.matrix(f"{name}.weight", shape, rows, values, self.quantize)

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        rows: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        quantize: str | None = None,
    ) -> QuantizedMatrix:
        self.reader.claim(name, shape)
        return load_matrix(
            self.reader.weights,
            name,
            thread_pool=self.thread_pool,
            keep=self.keep,
            quantize=quantize,
            rows=rows,
            bias=bias,
        )
