"""Weight files to a Decoder of torch: the names and checks are those of `load`.

On a CPU a weight is a view of its file if possible. To a CUDA device each is copied in chunks (see `staging`), straight
to its rows of the stacked matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.kernels.reference.quantized import tensor
from headway.models.config import read_config
from headway.models.decoder import Decoder
from headway.models.families import is_llama_like
from headway.models.files.staging import Staging
from headway.models.files.weights import open_weights
from headway.models.layers import DecoderLayer, Linear, fused
from headway.models.load import LoadProgress, NamedWeights, names_in
from headway.models.rows import half_split

Change = Callable[[DecoderLayer], DecoderLayer]


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
    config, names = read_config(path), names_in(path)
    if not is_llama_like(config):
        from headway.models.load_described import load_described  # most models do not need it

        return load_described(path, config, dtype=dtype, device=device, progress=progress)
    with ExitStack() as stack:
        weights = open_weights(path)
        stack.callback(weights.close)
        if staging is None and device.type == "cuda":
            staging = Staging(device)
        if staging is None:
            reader = _Reader(config, weights, names, set(), dtype, device)
        else:
            reader = _StagedReader(config, weights, names, set(), dtype, device, stack.enter_context(staging))
        return _build(reader, progress, change)


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
        inv_freq=tensor(reader.frequencies()).to(reader.device),
    )
    reader.check_all_used()
    return decoder


@dataclass(frozen=True, eq=False)
class _Reader(NamedWeights):
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.claim(name, shape)
        return self.weights.load(name, dtype=self.dtype, device=self.device)

    def settled(self, layer: DecoderLayer) -> DecoderLayer:
        """The layer, once its weights may be read."""
        return layer

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
            return half_split(tensor, self.config.head_dim).contiguous()
        return tensor


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
