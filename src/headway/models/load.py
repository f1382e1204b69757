"""Weight files to a Decoder: names, shapes, layout. Errors name a weight that is missing, extra or misshapen.

On a CPU a weight is a view of its file if possible. To a CUDA device each is copied in chunks (see `staging`), straight
to its rows of the stacked matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.base.errors import BadModelFile, Unsupported
from headway.kernels.native.library import ThreadPool
from headway.kernels.reference.quantized import QuantizedMatrix
from headway.kernels.reference.rope import frequencies
from headway.models.config import ModelConfig, read_config
from headway.models.decoder import Decoder
from headway.models.families import is_llama_like
from headway.models.files.dequant import FLOATS
from headway.models.files.staging import Staging
from headway.models.files.weights import Weights, open_weights
from headway.models.layers import DecoderLayer, Linear, fused, half_split
from headway.models.quantized.cpu import QuantizedDecoder, QuantizedLayer
from headway.models.quantized.repack import load_matrix

LoadProgress = Callable[[int, int], None]  # layers done, total layers
Change = Callable[[DecoderLayer], DecoderLayer]

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


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress | None = None,
    change: Change | None = None,
    staging: Staging | None = None,
) -> Decoder:
    """The decoder in a Hugging Face folder or a GGUF file, its weights in one dtype on one device.

    `change` is applied to each layer as soon as it is loaded, so that a model that is then quantized is never in memory
    whole. `staging` copies weights to the device; a CUDA device has one by default.
    """
    config, names = read_config(path), GGUF_NAMES if path.is_file() else HF_NAMES
    if not is_llama_like(config):
        from headway.models.load_described import load_described  # it builds on this module

        return load_described(path, config, dtype=dtype, device=device, progress=progress)
    with ExitStack() as stack:
        weights = open_weights(path)
        stack.callback(weights.close)
        if staging is None and device.type == "cuda":
            staging = Staging(device)
        if staging is None:
            reader = _Reader(config, weights, names, dtype, device, set())
        else:
            reader = _StagedReader(config, weights, names, dtype, device, set(), stack.enter_context(staging))
        return _build(reader, progress, change)


def load_quantized_model(
    path: Path,
    *,
    thread_pool: ThreadPool | None,
    keep: bool = True,
    quantize: str | None = None,
    progress: LoadProgress | None = None,
) -> QuantizedDecoder:
    """The decoder for the CPU's native step, or for its torch reference, which has no thread pool.

    `keep` leaves each matrix in its stored type, else it becomes float32.

    `quantize` is for float matrices: int8, or int4 (with the embedding and the output in int8).
    """
    config, weights = read_config(path), open_weights(path)
    names = GGUF_NAMES if path.is_file() else HF_NAMES
    try:
        reader = _Reader(config, weights, names, torch.float32, torch.device("cpu"), set())
        if quantize is not None and keep:
            _check_floats(path, weights, quantize)
        decoder = _QuantizedReader(reader, thread_pool, keep, quantize).decoder(progress)
        reader.check_all_used()
        return decoder
    finally:
        weights.close()


def has_quantized(path: Path) -> bool:
    """Whether a model's file has quantized matrices."""
    with open_weights(path) as weights:
        return any(len(weights.shape(name)) == 2 and weights.stored(name) not in FLOATS for name in weights.names())


def stored_dtype(path: Path) -> torch.dtype | None:
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


def _build(reader: _Reader, progress: LoadProgress | None, change: Change | None) -> Decoder:
    """The decoder with these weights."""
    config, names = reader.config, reader.names
    v, e = config.vocab_size, config.hidden_size
    embedding = reader.tensor(names["embedding"], (v, e))
    layers = []
    for i in range(config.layers):
        layers.append(reader.layer(i) if change is None else change(reader.settled(reader.layer(i))))
        if progress is not None:
            progress(i + 1, config.layers)
    decoder = Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=reader.tensor(names["final_norm"], (e,)),
        output=embedding if config.tied else reader.tensor(names["output"], (v, e)),
        inv_freq=reader.frequencies(),
    )
    reader.check_all_used()
    return decoder


@dataclass(frozen=True, eq=False)
class _Reader:
    config: ModelConfig
    weights: Weights
    names: dict[str, str]
    dtype: torch.dtype
    device: torch.device
    used: set[str]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.claim(name, shape)
        return self.weights.load(name, dtype=self.dtype, device=self.device)

    def settled(self, layer: DecoderLayer) -> DecoderLayer:
        """The layer, once its weights may be read."""
        return layer

    def claim(self, name: str, shape: tuple[int, ...]) -> None:
        """Mark a weight as used; raise if it is missing or has another shape."""
        check_weight(self.weights, self.weights.names(), name, shape)
        self.used.add(name)

    def check_all_used(self) -> None:
        check_all_used(self.weights, self.used, self.config.family)

    def layer(self, i: int) -> DecoderLayer:
        c, n = self.config, self.names
        at = n["layer"].format(i)
        e, f, d, q, kv = c.hidden_size, c.intermediate_size, c.head_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim
        return DecoderLayer(
            input_norm=self.tensor(at + n["input_norm"], (e,)),
            qkv=self.linear(at, (("q", q), ("k", kv), ("v", kv)), e, c.qkv_bias),
            q_norm=self.tensor(at + n["q_norm"], (d,)) if c.qk_norm else None,
            k_norm=self.tensor(at + n["k_norm"], (d,)) if c.qk_norm else None,
            out=self.linear(at, (("o", e),), q, c.o_bias),
            mlp_norm=self.tensor(at + n["mlp_norm"], (e,)),
            gate_up=self.linear(at, (("gate", f), ("up", f)), e, c.mlp_bias),
            down=self.linear(at, (("down", e),), f, c.mlp_bias),
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=d,
            eps=c.norm_eps,
        )

    def linear(self, at: str, parts: tuple[tuple[str, int], ...], width: int, bias: bool) -> Linear:
        """Matrices stacked into one [sum of rows, width], with their biases."""
        weight = fused([self.part(f"{at}{self.names[p]}.weight", p, (rows, width)) for p, rows in parts])
        if not bias:
            return Linear(weight)
        return Linear(weight, fused([self.part(f"{at}{self.names[p]}.bias", p, (rows,)) for p, rows in parts]))

    def part(self, name: str, role: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensor(name, shape)
        if role in ("q", "k") and self.config.interleaved_weights:
            return half_split(tensor, self.config.head_dim)
        return tensor

    def frequencies(self) -> Tensor:
        """Rotation frequencies; a GGUF file may carry a divisor for each (`rope_freqs`)."""
        inv_freq = frequencies(self.config.rope).to(self.device)
        if self.names is GGUF_NAMES and "rope_freqs.weight" in self.weights.names():
            self.used.add("rope_freqs.weight")
            if self.weights.shape("rope_freqs.weight") != tuple(inv_freq.shape):
                raise BadModelFile(
                    f"the weight 'rope_freqs.weight' has shape {list(self.weights.shape('rope_freqs.weight'))}; "
                    f"this config needs {list(inv_freq.shape)}"
                )
            inv_freq = inv_freq / self.weights.load("rope_freqs.weight", dtype=torch.float32, device=self.device)
        return inv_freq


@dataclass(frozen=True, eq=False)
class _StagedReader(_Reader):
    """Reads the same weights in chunks, straight into tensors allocated for them."""

    staging: Staging

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.fill(name, self.empty(shape))

    def settled(self, layer: DecoderLayer) -> DecoderLayer:
        self.staging.settle()
        return layer

    def linear(self, at: str, parts: tuple[tuple[str, int], ...], width: int, bias: bool) -> Linear:
        rows = sum(count for _, count in parts)
        weight = self.stack(at, "weight", parts, self.empty((rows, width)))
        return Linear(weight, self.stack(at, "bias", parts, self.empty((rows,))) if bias else None)

    def stack(self, at: str, what: str, parts: tuple[tuple[str, int], ...], whole: Tensor) -> Tensor:
        """Fill a stacked matrix, or a stacked bias, from its parts."""
        for (role, _), rows in zip(parts, whole.split([count for _, count in parts]), strict=True):
            pairs = self.config.head_dim if role in ("q", "k") and self.config.interleaved_weights else 0
            self.fill(f"{at}{self.names[role]}.{what}", rows, pairs)
        return whole

    def fill(self, name: str, target: Tensor, pairs: int = 0) -> Tensor:
        self.claim(name, tuple(target.shape))
        self.staging.send(self.weights.span(name), self.weights.stored(name), target, f"tensor {name!r}", pairs=pairs)
        return target

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class _QuantizedReader:
    """Reads the same weights as `QuantizedMatrix`."""

    reader: _Reader
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
            final_norm=reader.tensor(names["final_norm"], (c.hidden_size,)),
            output=embedding if c.tied else self.matrix(names["output"], table, quantize=coarse),
            inv_freq=reader.frequencies(),
        )

    def layer(self, i: int) -> QuantizedLayer:
        c, n, reader = self.reader.config, self.reader.names, self.reader
        at = n["layer"].format(i)
        e, f, d, q, kv = c.hidden_size, c.intermediate_size, c.head_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim
        return QuantizedLayer(
            input_norm=reader.tensor(at + n["input_norm"], (e,)),
            mlp_norm=reader.tensor(at + n["mlp_norm"], (e,)),
            q_norm=reader.tensor(at + n["q_norm"], (d,)) if c.qk_norm else None,
            k_norm=reader.tensor(at + n["k_norm"], (d,)) if c.qk_norm else None,
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
            rows = half_split(torch.arange(shape[0]), self.reader.config.head_dim)
        name = at + self.reader.names[role]
        values = self.reader.tensor(f"{name}.bias", shape[:1]) if bias else None
        if values is not None and rows is not None:
            values = values[rows]
        return self.matrix(f"{name}.weight", shape, rows, values, self.quantize)

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        rows: Tensor | None = None,
        bias: Tensor | None = None,
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
