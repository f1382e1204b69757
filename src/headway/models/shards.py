"""One rank's share of a decoder: the matmuls of a layer split by columns and rows, with heads, experts and vocabulary.

    h ──▶ q k v ──▶ attention ──▶ out ──▶ Σ ──▶ gate up ──▶ down ──▶ Σ        h and Σ [R, E] are the same on every rank
          rows of W   its heads   columns        rows of W   columns           Σ sums over ranks

A rank has H/N heads with their keys, F/N of the feed-forward or X/N whole experts, and V/N rows of embedding and head.
The pieces are those of `Decoder`; what makes one a share of the whole is a `RankLink` to the other ranks. Nothing here
knows processes, devices or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.linear import linear
from headway.kernels.reference.lora import plus
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.described import DescribedDecoder, DescribedLayer
from headway.models.description import Description
from headway.models.experts import ExpertWeights, LayerAdapters
from headway.models.layers import DecoderLayer, Linear


class RankLink(Protocol):
    """What a rank's share of a model needs of the others. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's part, of the same shape and type."""
        ...

    def gather(self, part: Tensor) -> list[Tensor] | None:
        """Every rank's part, of one shape, in their order, on rank 0; None on others."""
        ...

    def begin_head(self, h: Tensor) -> None:
        """Rank 0 has the others compute their logits of normed rows h [R, E]; on others nothing happens."""
        ...


def vocabulary_share(vocab: int, size: int) -> int:
    """Rows of the vocabulary that a rank has; the last may have fewer."""
    return -(-vocab // size)


@dataclass(frozen=True, eq=False)
class RowSplit(Linear):
    """Some columns of a weight: what every rank makes of its own inputs is summed, then the bias is added."""

    link: RankLink | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self.link is not None
        y = self.link.sum(linear(x, self.weight))
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """Some rows of an embedding or of the output matrix [V, E]: `shard[tokens]` looks tokens up, `shard(h)` has the
    logits of the whole vocabulary on rank 0."""

    weight: Tensor  # [n, E]
    vocab: int
    link: RankLink

    def __getitem__(self, tokens: Tensor) -> Tensor:
        """Rows [T, E] of tokens [T]: the rank that has a token adds it to the others' zeros."""
        at = tokens - self.link.rank * vocabulary_share(self.vocab, self.link.size)
        own = (at >= 0) & (at < len(self.weight))
        if len(self.weight) == 0:
            return self.link.sum(self.weight.new_zeros(len(tokens), self.weight.shape[1]))
        rows = self.weight[at.clamp(0, len(self.weight) - 1)]
        return self.link.sum(rows.masked_fill(~own[:, None], 0))

    def __call__(self, h: Tensor) -> Tensor:
        """Logits [R, V] of normed rows h [R, E] on rank 0; on others those of the rank's own rows."""
        self.link.begin_head(h)
        share = vocabulary_share(self.vocab, self.link.size)
        part = h.new_zeros(len(h), share)
        part[:, : len(self.weight)] = linear(h, self.weight)
        parts = self.link.gather(part)
        return part if parts is None else torch.cat(parts, dim=1)[:, : self.vocab]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, eq=False)
class ExpertShard(ExpertWeights):
    """Some of a layer's experts. Every rank routes every row, and adds what its own experts make of it."""

    first: int = 0
    link: RankLink | None = None

    def __call__(
        self,
        h: Tensor,
        gate_up: Linear,
        down: Linear,
        activation: str,
        *,
        exact: bool,
        added: LayerAdapters | None = None,
    ) -> Tensor:
        assert self.link is not None
        count = len(gate_up.weight)
        chosen, weights = self.route(h, added)  # [R, k]
        own = chosen.flatten() - self.first
        mine = ((own >= 0) & (own < count)).nonzero().flatten()
        order = mine[own[mine].argsort(stable=True)]  # by expert
        counts = torch.bincount(own[mine], minlength=count).tolist()
        tile, places, experts = len(h) if exact else None, order // self.what.per_token, chosen.flatten()[order]

        def matmul(x: Tensor, matrices: Linear, stack: str) -> Tensor:
            y = self.by_expert(x, matrices, counts, tile)
            return y if added is None else plus(y, added.expert_delta(stack, x, places, experts))

        inner = self._gated(matmul(h[places], gate_up, "expert_gate_up"), activation, exact)
        parts = torch.zeros(chosen.numel(), h.shape[1], dtype=h.dtype, device=h.device)
        parts[order] = matmul(inner, down, "expert_down")
        parts = parts.unflatten(0, chosen.shape) * weights.to(h.dtype)[..., None]  # [R, k, E]
        total = parts[:, 0]
        for i in range(1, self.what.per_token):
            total = total + parts[:, i]
        return self.link.sum(self._plus_shared(h, total, activation, exact, added))


@dataclass(frozen=True, eq=False, kw_only=True)
class RowNormShard(DescribedLayer):
    """A layer that norms queries and keys over all heads: the mean square is that of every rank's heads."""

    link: RankLink

    def _heads(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return super()._heads(rows, None)
        wide = rows.float()
        squares = self.link.sum(wide.square().sum(-1, keepdim=True)) / (rows.shape[-1] * self.link.size)
        rows = weight * (wide * torch.rsqrt(squares + self.eps)).to(rows.dtype)
        return super()._heads(rows, None)


@dataclass(frozen=True, eq=False)
class Split:
    """Takes a rank's share of whole weights, each as soon as it is loaded; `place` is the device of what it keeps."""

    link: RankLink
    config: ModelConfig  # of the whole model
    place: torch.device

    @property
    def own_config(self) -> ModelConfig:
        """The config of a rank's layers. Vocabulary and experts count as in the whole model."""
        c, n = self.config, self.link.size
        inner = c.intermediate_size // n if c.intermediate_size % n == 0 else c.intermediate_size  # of experts alone
        own: Description = c.description
        if own.experts is not None:
            own = replace(own, experts=replace(own.experts, shared_size=own.experts.shared_size // n))
        return replace(c, heads=c.heads // n, kv_heads=c.kv_heads // n, intermediate_size=inner, description=own)

    def decoder(self, decoder: Decoder) -> Decoder:
        """The share of a decoder that is in memory whole."""
        layers = tuple([self.layer(layer) for layer in decoder.layers])
        return self.finished(replace(self.outside(decoder), layers=layers))

    def outside(self, decoder: Decoder) -> Decoder:
        """The decoder with its share of embedding and output."""
        embedding: Any = self.vocabulary(decoder.embedding)
        output = embedding if decoder.output is decoder.embedding else self.vocabulary(decoder.output)
        return replace(decoder, embedding=embedding, output=output)

    def finished(self, decoder: Decoder) -> Decoder:
        """A decoder of shares, with the rest of it on this rank's device and with its rank's config."""
        rest: dict[str, Any] = {name: self._kept(getattr(decoder, name)) for name in ("final_norm", "inv_freq")}
        if isinstance(decoder, DescribedDecoder):
            names = ("final_norm_bias", "output_bias", "positions")
            rest |= {name: self._kept(getattr(decoder, name)) for name in names}
        return replace(decoder, config=self.own_config, **rest)

    def vocabulary(self, whole: Tensor) -> VocabularyShard:
        """The share of an embedding or an output matrix."""
        share = vocabulary_share(self.config.vocab_size, self.link.size)
        own = whole[self.link.rank * share : (self.link.rank + 1) * share]
        return VocabularyShard(self._own(own), self.config.vocab_size, self.link)

    def layer(self, layer: DecoderLayer) -> DecoderLayer:
        """The share of a layer."""
        c, n = self.config, self.link.size
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        changed: dict[str, Any] = {
            "qkv": self._by_rows(layer.qkv, (q, kv, kv)),
            "out": self._by_columns(layer.out),
            "q_norm": self._norm(layer.q_norm),
            "k_norm": self._norm(layer.k_norm),
            "heads": c.heads // n,
            "kv_heads": c.kv_heads // n,
            "input_norm": self._kept(layer.input_norm),
            "mlp_norm": self._kept(layer.mlp_norm),
        }
        if not isinstance(layer, DescribedLayer):
            return replace(layer, **changed, **self._feed_forward(layer, gated=True))
        for name in ("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm"):
            changed[name] = self._kept(getattr(layer, name))
            changed[f"{name}_bias"] = self._kept(getattr(layer, f"{name}_bias"))
        changed["sinks"] = None if layer.sinks is None else self.part(layer.sinks)
        if layer.experts is None:
            changed |= self._feed_forward(layer, gated=layer.description.gated)
        else:
            changed["gate_up"] = Linear(*self._experts_of(layer.gate_up))
            changed["down"] = Linear(*self._experts_of(layer.down))
            changed["experts"] = self._router(layer.experts)
        own = replace(layer, **changed)
        if own.q_norm is None or own.description.qk_norm != "row":
            return own
        parts = {name: getattr(own, name) for name in DescribedLayer.__dataclass_fields__}
        return RowNormShard(**parts, link=self.link)

    def _feed_forward(self, layer: DecoderLayer, *, gated: bool) -> dict[str, Any]:
        f = self.config.intermediate_size
        gate_up = self._by_rows(layer.gate_up, (f, f) if gated else (f,))
        return {"gate_up": gate_up, "down": self._by_columns(layer.down)}

    def _router(self, experts: ExpertWeights) -> ExpertShard:
        shared: dict[str, Any] = {}
        if experts.shared_gate_up is not None and experts.shared_down is not None:
            size = experts.what.shared_size
            down = self.part(experts.shared_down.weight, 1)  # its sum is the experts' own
            assert experts.shared_down.bias is None, "it would be added by every rank"
            shared["shared_gate_up"] = self._by_rows(experts.shared_gate_up, (size, size))
            shared["shared_down"] = Linear(down)
            shared["shared_router"] = self._whole(experts.shared_router)
        first = experts.what.count // self.link.size * self.link.rank
        return ExpertShard(experts.what, self._whole(experts.router), **shared, first=first, link=self.link)

    def _experts_of(self, linear: Linear) -> tuple[Tensor, Tensor | None]:
        return self.part(linear.weight), None if linear.bias is None else self.part(linear.bias)

    def _by_rows(self, linear: Linear, parts: Sequence[int]) -> Linear:
        """The share of each part of a stacked matrix: some of its outputs."""

        def own(whole: Tensor) -> Tensor:
            return self._own(torch.cat([self._slice(part) for part in whole.split(list(parts))]))

        return Linear(own(linear.weight), None if linear.bias is None else own(linear.bias))

    def _by_columns(self, linear: Linear) -> RowSplit:
        """The share of a matrix that takes some of its inputs."""
        return RowSplit(self.part(linear.weight, 1), self._kept(linear.bias), self.link)

    def _norm(self, weight: Tensor | None) -> Tensor | None:
        """A norm for all heads stays; one with weights of each head's own is split as they are."""
        if weight is None or self.config.description.qk_norm == "head":
            return self._kept(weight)
        return self.part(weight)

    def _whole(self, linear: Any) -> Any:
        return None if linear is None else Linear(self._kept(linear.weight), self._kept(linear.bias))

    def part(self, whole: Tensor, dim: int = 0) -> Tensor:
        """The share of a weight that is split along a dimension."""
        return self._own(self._slice(whole, dim))

    def _slice(self, whole: Tensor, dim: int = 0) -> Tensor:
        count = whole.shape[dim] // self.link.size
        return whole.narrow(dim, self.link.rank * count, count)

    def _own(self, part: Tensor) -> Tensor:
        """A copy on this rank's device, so that the whole can go."""
        return part.to(self.place, copy=True, memory_format=torch.contiguous_format)

    def _kept(self, whole: Any) -> Any:
        return None if whole is None else self._own(whole)
