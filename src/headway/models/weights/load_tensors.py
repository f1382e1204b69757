"""Weight files to a Decoder of torch.

On a CPU a weight is a view of its file if possible. To a CUDA device each is copied in chunks (see `staging`), straight
to its rows of the stacked matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.quantized import tensor
from headway.models.config import read_config
from headway.models.decoder import Decoder
from headway.models.families import is_llama_like
from headway.models.files.quantized_folder import QuantizedFolder
from headway.models.files.staging import Staging
from headway.models.files.weights import open_weights
from headway.models.layers import DecoderLayer, Linear, fused
from headway.models.weights.load import LoadProgress
from headway.models.weights.roles import Roles
from headway.models.weights.rows import half_split

if TYPE_CHECKING:
    from headway.models.shards import Split

Change = Callable[[DecoderLayer], DecoderLayer]


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress | None = None,
    change: Change | None = None,
    staging: Staging | None = None,
    split: Split | None = None,
    keep_experts: bool = False,
    quantize_experts: str | None = None,
) -> Decoder:
    """The decoder in a Hugging Face folder or a GGUF file, its weights in one dtype on one device.

    `change` is applied to each layer as soon as it is loaded, so that a model that is then quantized is never in memory
    whole. `staging` copies weights to the device; a CUDA device has one by default. With `split` a weight is read
    on the CPU, and only this rank's share of it is kept: one whole weight, or one layer, is in memory at a time.
    `keep_experts` leaves experts as they are stored, where kernels read them so; `quantize_experts`, int4 or int8, is
    for others.
    """
    config = read_config(path)
    if not is_llama_like(config):
        from headway.models.weights.load_described import load_described  # most models do not need it

        how: dict[str, Any] = {"progress": progress, "split": split, "keep_experts": keep_experts}
        return load_described(path, config, dtype=dtype, device=device, quantize=quantize_experts, **how)
    if split is not None:
        device, change = torch.device("cpu"), split.layer
    with ExitStack() as stack:
        weights = open_weights(path)
        stack.callback(weights.close)
        if staging is None and device.type == "cuda":
            staging = Staging(device)
        roles = Roles.of(path, config, weights)
        roles.check()
        if staging is None:
            reader = _TensorReader(roles, dtype, device)
        else:
            reader = _StagedReader(roles, dtype, device, stack.enter_context(staging))
        return _build(reader, progress, change, split)


def _build(
    reader: _TensorReader, progress: LoadProgress | None, change: Change | None, split: Split | None = None
) -> Decoder:
    """The decoder with these weights."""
    config = reader.roles.config
    v, e = config.vocab_size, config.hidden_size

    def vocabulary(role: str) -> Any:
        whole = reader.tensor(role, (v, e))
        return whole if split is None else split.vocabulary(whole)

    embedding = vocabulary("embedding")
    layers = []
    for i in range(config.layers):
        layers.append(reader.layer(i) if change is None else change(reader.settled(reader.layer(i))))
        if progress is not None:
            progress(i + 1, config.layers)
    decoder = Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=reader.tensor("final_norm", (e,)),
        output=embedding if config.tied else vocabulary("output"),
        inv_freq=tensor(reader.roles.frequencies()).to(reader.device),
    )
    return decoder if split is None else split.finished(decoder)


@dataclass(frozen=True, eq=False)
class _TensorReader:
    roles: Roles
    dtype: torch.dtype
    device: torch.device

    def tensor(self, role: str, shape: tuple[int, ...], at: str = "") -> Tensor:
        return self.roles.weights.load(self.claim(role, shape, at), dtype=self.dtype, device=self.device)

    def claim(self, role: str, shape: tuple[int, ...], at: str) -> str:
        """The name of a role's weight; `at` goes before it."""
        part = self.roles.part(role)
        assert isinstance(part, str), role
        return self.roles.claim(at + part, shape)

    def settled(self, layer: DecoderLayer) -> DecoderLayer:
        """The layer, once its weights may be read."""
        return layer

    def layer(self, i: int) -> DecoderLayer:
        c, at = self.roles.config, self.roles.layer(i)
        e, f, d, q, kv = c.hidden_size, c.intermediate_size, c.head_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim
        return DecoderLayer(
            input_norm=self.tensor("input_norm", (e,), at),
            qkv=self.linear(at, (("q", q), ("k", kv), ("v", kv)), e, c.qkv_bias),
            q_norm=self.tensor("q_norm", (d,), at) if c.qk_norm else None,
            k_norm=self.tensor("k_norm", (d,), at) if c.qk_norm else None,
            out=self.linear(at, (("o", e),), q, c.o_bias),
            mlp_norm=self.tensor("mlp_norm", (e,), at),
            gate_up=self.linear(at, (("gate", f), ("up", f)), e, c.mlp_bias),
            down=self.linear(at, (("down", e),), f, c.mlp_bias),
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=d,
            eps=c.norm_eps,
        )

    def linear(self, at: str, parts: tuple[tuple[str, int], ...], width: int, bias: bool) -> Linear:
        """Matrices stacked into one [sum of rows, width], with their biases."""
        weight = fused([self.part(at, role, (rows, width)) for role, rows in parts])
        if not bias:
            return Linear(weight)
        return Linear(weight, fused([self.part(at, f"{role}_bias", (rows,)) for role, rows in parts]))

    def part(self, at: str, role: str, shape: tuple[int, ...]) -> Tensor:
        tensor, c = self.tensor(role, shape, at), self.roles.config
        return half_split(tensor, c.head_dim).contiguous() if self.pairs(role) else tensor

    def pairs(self, role: str) -> bool:
        """Whether its rows are stored for rotation of neighboring pairs."""
        return role.removesuffix("_bias") in ("q", "k") and self.roles.config.interleaved_weights


@dataclass(frozen=True, eq=False)
class _StagedReader(_TensorReader):
    """Reads the same weights in chunks, straight into tensors allocated for them."""

    staging: Staging

    def tensor(self, role: str, shape: tuple[int, ...], at: str = "") -> Tensor:
        return self.fill(role, self.empty(shape), at)

    def settled(self, layer: DecoderLayer) -> DecoderLayer:
        self.staging.settle()
        return layer

    def linear(self, at: str, parts: tuple[tuple[str, int], ...], width: int, bias: bool) -> Linear:
        rows = sum(count for _, count in parts)
        weight = self.stack(at, "", parts, self.empty((rows, width)))
        return Linear(weight, self.stack(at, "_bias", parts, self.empty((rows,))) if bias else None)

    def stack(self, at: str, what: str, parts: tuple[tuple[str, int], ...], whole: Tensor) -> Tensor:
        """Fill a stacked matrix, or a stacked bias, from its parts."""
        for (role, _), rows in zip(parts, whole.split([count for _, count in parts]), strict=True):
            self.fill(role + what, rows, at)
        return whole

    def fill(self, role: str, target: Tensor, at: str) -> Tensor:
        name, weights = self.claim(role, tuple(target.shape), at), self.roles.weights
        if isinstance(weights, QuantizedFolder) and weights.is_quantized(name):  # dequantized on the host
            values = weights.load(name, dtype=self.dtype, device="cpu")
            target.copy_(half_split(values, self.roles.config.head_dim) if self.pairs(role) else values)
            return target
        pairs = self.roles.config.head_dim if self.pairs(role) else 0
        self.staging.send(weights.span(name), weights.stored(name), target, f"tensor {name!r}", pairs=pairs)
        return target

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
