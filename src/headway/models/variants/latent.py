"""The decoder of a family with latent attention: one key head in the KV cache, of which all heads read.

    h ──▶ kv_down ─┬─▶ norm ────▶ latent c ──▶ KV cache      a head's key is [r, Wk c], its value Wv c
                   └─▶ rotate ──▶ key r ─────▶ KV cache

A head's score q·(Wk c) is (Wkᵀq)·c, so queries are taken to the latent space and attend to slots [r, c]; what they get
is a mean of latent vectors, of which Wv makes the head's output. Keys and values of heads are never made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.linear import by_rows
from headway.kernels.reference.lora import Delta, plus
from headway.kernels.reference.norm import rms_norm
from headway.models.decoder import Mixing
from headway.models.described import DescribedDecoder, DescribedLayer
from headway.models.description import LatentAttention
from headway.models.experts import LayerAdapters
from headway.models.layers import Linear


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentLayer(DescribedLayer):
    """A layer with latent attention. `qkv` makes queries, or the latent vector of which `q_up` makes them."""

    kv_down: Linear  # [latent + rotated, E]
    kv_down_norm: Tensor  # [latent]
    key_up: Tensor  # [H, latent, key]
    value_up: Tensor  # [H, value, latent]
    q_down_norm: Tensor | None = None
    q_up: Linear | None = None

    @property
    def projections(self) -> tuple[Any, ...]:
        return self.qkv, self.q_down_norm, self.q_up, self.kv_down, self.kv_down_norm, self.key_up, self.value_up

    @property
    def latent(self) -> LatentAttention:
        assert self.description.latent is not None
        return self.description.latent

    def project(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """h [R, E] → q [R, H, rotated + latent], k [R, 1, rotated + latent] and its latent part, before rotation."""
        return self.project_up(*self.project_down(h, delta))

    def project_down(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor, Tensor]:
        """h [R, E] → queries, or the normed latent vectors of which they are made; latent vectors and keys."""
        queries, down = self.qkv(h), self.kv_down(h)
        if delta is not None:
            queries, down = plus(torch.cat((queries, down), -1), delta).split((queries.shape[-1], down.shape[-1]), -1)
        if self.q_down_norm is not None:
            queries = self.norm_latent(queries, self.q_down_norm)
        return queries, down

    def project_up(
        self, queries: Tensor, down: Tensor, delta: Delta | None = None, *, added: LayerAdapters | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `project` gives, of what `project_down` gave."""
        how = self.latent
        if self.q_up is not None:
            queries = plus(self.q_up(queries), delta)
        plain, turned = queries.unflatten(-1, (self.heads, -1)).split((how.key_dim, how.rotated), -1)
        latent, key = down.split((how.size, how.rotated), -1)
        latent = self.norm_latent(latent, self.kv_down_norm)
        plain = self.with_added(self.by_head(plain, self.key_up), added, "key_up", plain)
        q = torch.cat((self._halves(turned), plain), -1)
        k = torch.cat((self._halves(key), latent), -1)[:, None]
        return q, k, latent[:, None]

    def from_latent(self, mixed: Tensor, *, added: LayerAdapters | None = None) -> tuple[Tensor]:
        """Every head's output [R, H, value] of its mean of latent vectors [R, H, latent]."""
        return (self.with_added(self.by_head(mixed, self.value_up), added, "value_up", mixed),)

    def with_added(self, y: Tensor, added: LayerAdapters | None, stack: str, x: Tensor) -> Tensor:
        """What heads made [R, H, N] of x [R, H, K], with what adapters add to the matrix of each."""
        if added is None:
            return y
        rows, heads = (torch.arange(count, device=x.device) for count in x.shape[:2])
        places, numbers = rows.repeat_interleave(len(heads)), heads.repeat(len(rows))
        delta = added.expert_delta(stack, x.flatten(0, 1), places, numbers)
        return plus(y.flatten(0, 1), delta).view_as(y)

    def norm_latent(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.latent.eps)

    def by_head(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Rows of every head [R, H, K] by its own matrix [H, N, K] → [R, H, N]."""
        return torch.einsum("rhk,hnk->rhn", x, matrices)

    def _halves(self, x: Tensor) -> Tensor:
        """Dimensions that are rotated in neighboring pairs, as the rotation of halves takes them."""
        return torch.cat((x[..., 0::2], x[..., 1::2]), -1) if self.latent.paired else x


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentDecoder(DescribedDecoder):
    """A decoder of layers with latent attention."""

    layers: tuple[LatentLayer, ...]  # type: ignore[assignment]

    def project(self, l: int, h: Tensor, mixing: Mixing) -> tuple[Tensor, ...]:
        layer, tile, step = self.layers[l], mixing.tile, mixing.step
        queries, down = by_rows(tile, layer.project_down, h, *step.delta(l, "qkv", h))
        delta = step.delta(l, "q_up", queries)
        if step.adapters is None:
            return by_rows(tile, layer.project_up, queries, down, *delta)
        added = LayerAdapters(step.adapters, l)

        def project_up(queries: Tensor, down: Tensor, rows: Tensor, *delta: Delta) -> tuple[Tensor, ...]:
            return layer.project_up(queries, down, *delta, added=added.of(rows))

        return by_rows(tile, project_up, queries, down, torch.arange(len(h), device=h.device), *delta)

    def attend(self, l: int, h: Tensor, mixing: Mixing) -> Tensor:
        mixed, layer = super().attend(l, h, mixing), self.layers[l]
        if mixing.step.adapters is None:
            return by_rows(mixing.tile, layer.from_latent, mixed)[0]
        added = LayerAdapters(mixing.step.adapters, l)

        def from_latent(mixed: Tensor, rows: Tensor) -> tuple[Tensor]:
            return layer.from_latent(mixed, added=added.of(rows))

        return by_rows(mixing.tile, from_latent, mixed, torch.arange(len(mixed), device=mixed.device))[0]

    def rows_of_each_kind(self, x: Tensor) -> list[Tensor]:
        tensors = [self.head(x, None)]
        for layer in {layer.experts is not None: layer for layer in self.layers}.values():
            q, k, v = layer.project(x)
            (mixed,) = layer.from_latent(q[..., self.layers[0].latent.rotated :])
            tensors += [*layer.norm_in(x), q, k, v, mixed, *layer.project_out(x, mixed)]
            tensors += layer.feed_forward(x, x, exact=True)
        return tensors
