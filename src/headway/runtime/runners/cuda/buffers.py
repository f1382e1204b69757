"""Device memory for the intermediates of a forward."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton import quantized
from headway.kernels.triton.fp8.scaled_matmul import ScaledMatrix
from headway.kernels.triton.fp8.scaled_rows import E4M3, ScaledRows, padded_inputs
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.description import Experts, LatentAttention


class Buffers:
    """Buffers for the intermediates of `rows` rows. Kernels of one stream use it in turn."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        c, dtype, device = decoder.config, decoder.dtype, decoder.device

        def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=kind, device=device)

        self.rows = rows
        self.x, self.h, self.delta = (empty(c.hidden_size) for _ in range(3))
        latent = c.description.latent
        self.latent = None if latent is None else LatentBuffers(c, latent, rows, dtype, device)
        shapes, inner = [c.kv_shape(layer) for layer in range(c.layers)], max(map(c.inner, range(c.layers)))
        widest = max(shape.dim for shape in shapes)  # layers of other widths have the first numbers, as `fit` says
        self.qkv = empty(0 if latent is not None else max((c.heads + 2 * s.heads) * s.dim for s in shapes))
        self.q, self.mixed = empty(c.heads, widest), empty(c.heads, latent.size if latent else widest)
        self.gate_up, self.inner = empty(2 * inner), empty(inner)
        self.angles = [empty(2, rope.dim // 2, kind=torch.float32) for rope in c.rope_sets[0]]
        what = c.description.experts
        self.experts = None if what is None else ExpertBuffers(c, what, rows, dtype, device)
        own = c.description.per_layer
        self.tokens = None
        if own is not None and own.inputs is not None:
            self.tokens = TokenBuffers(c.layers, own.inputs.size, rows, dtype, device)
        self.altup = None
        if (streams := c.description.altup) is not None:
            n, rank = streams.streams, streams.rank
            both = [torch.empty(n, rows, c.hidden_size, dtype=dtype, device=device) for _ in range(2)]
            small = [empty(width, kind=torch.float32) for width in (n, n, n * n)]
            self.altup = AltUpBuffers(both[0], both[1], empty(c.hidden_size), empty(rank), *small)
        self.beside = None
        if what is not None and what.beside_dense:
            self.beside = BesideBuffers(*(empty(c.hidden_size) for _ in range(3)))
        self._halves: list[tuple[Tensor, Tensor, Tensor]] = []
        self.scaled: dict[str, ScaledRows] = {}
        if isinstance(decoder.layers[0].qkv, ScaledMatrix):
            widths = {"h": c.hidden_size, "out": c.heads * c.head_dim, "inner": c.intermediate_size}
            room = empty(max(map(padded_inputs, widths.values())), kind=E4M3).flatten()  # of one at a time
            for name, width in widths.items():
                wide = padded_inputs(width)
                self.scaled[name] = ScaledRows(room[: rows * wide].view(rows, wide), empty(kind=torch.float32))

    def halves(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room in float16 for rows, normed [R, E], between gate and down [R, F], and out of attention [R, H, D]."""
        if not self._halves or len(self._halves[-1][0]) < rows:  # what is given stays: graphs go on using it
            size = min(self.rows, max(rows, quantized.FEW))
            shapes = (self.h[:size], self.inner[:size], self.mixed[:size])
            h, inner, mixed = (torch.empty_like(t, dtype=torch.float16) for t in shapes)
            self._halves.append((h, inner, mixed))
        h, inner, mixed = self._halves[-1]
        return h[:rows], inner[:rows], mixed[:rows]


def fit(room: Tensor, *shape: int) -> Tensor:
    """The first numbers of a buffer, in this shape."""
    return room.view(-1)[: prod(shape)].view(shape)


class TokenBuffers:
    """Buffers for what `rows` rows take of their tokens."""

    def __init__(self, layers: int, size: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.made, self.inputs = (torch.empty(rows, layers * size, dtype=dtype, device=device) for _ in range(2))
        self.gate = torch.empty(rows, size, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class BesideBuffers:
    """Buffers for experts beside a feed-forward: the rows they read, those the router reads, what they make."""

    rows: Tensor
    reads: Tensor
    out: Tensor


@dataclass(frozen=True, eq=False)
class AltUpBuffers:
    """Buffers for residuals side by side [n, rows, E], as they are and as they are predicted, and for a product of low
    rank and the rows between its matrices. The last three are for adapters, in float32: what decides how much streams
    have of each other, and what is added to it and to the shares."""

    streams: Tensor
    predicted: Tensor
    raised: Tensor
    low: Tensor
    kinds: Tensor  # [rows, n]
    into: Tensor  # [rows, n]
    shares: Tensor  # [rows, n n]


class LatentBuffers:
    """Buffers for what `rows` rows have around latent attention."""

    def __init__(
        self, c: ModelConfig, what: LatentAttention, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        self.low, self.normed = empty(what.query_size), empty(what.query_size)
        self.queries = empty(c.heads * what.query_dim)
        self.down = empty(what.size + what.rotated)  # the latent vector, then the key that is rotated
        self.heads = empty(c.heads, what.value_dim)


class ExpertBuffers:
    """Buffers for the intermediates of `rows` rows at their experts."""

    def __init__(self, c: ModelConfig, what: Experts, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        pairs = rows * what.per_token
        self.logits = empty(rows, what.count, kind=dtype if what.groups is None else torch.float32)
        self.chosen = empty(rows, what.per_token, kind=torch.int32)
        self.weights = empty(rows, what.per_token, kind=torch.float32)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.order, self.blocks = empty(pairs, kind=torch.int32), empty(pairs, 3, kind=torch.int32)
        self.inner, self.parts = empty(pairs, what.size), empty(pairs, c.hidden_size)
        self.shared_gate_up, self.shared_inner = empty(rows, 2 * what.shared_size), empty(rows, what.shared_size)
        self.shared, self.shared_gate = empty(rows, c.hidden_size if what.shared_size else 0), empty(rows, 1)
