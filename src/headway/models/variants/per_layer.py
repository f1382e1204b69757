"""The decoder of a family whose layers differ from each other: heads and widths of their own, keys and values of an
earlier layer, and inputs of the token itself (Gemma 4).

    layers without keys     q ──▶ attention ◀── the slots of an earlier layer of the same kind
    what a layer adds       act(gate x) × (table[token] + norm(W embedding)) / √2 ──▶ projection ──▶ norm ──▶ + x
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.linear import by_rows, linear
from headway.kernels.reference.lora import Delta, plus
from headway.kernels.reference.norm import unit_norm
from headway.kernels.reference.rope import rotate
from headway.models.decoder import DecoderInput, Mixing
from headway.models.described import DescribedDecoder, DescribedLayer, bytes_of
from headway.models.experts import ExpertWeights, LayerAdapters, adding, of_rows, with_added
from headway.models.layers import Linear


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertsBeside:
    """Experts beside a layer's ordinary feed-forward, and the norms of both."""

    experts: ExpertWeights
    gate_up: Linear  # [X, 2F, E]
    down: Linear  # [X, E, F]
    dense_norm: Tensor
    expert_in_norm: Tensor
    expert_out_norm: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class PerLayerLayer(DescribedLayer):
    """A layer whose values are normed. `qkv` makes q alone where keys and values are another layer's, and q and k where
    values are keys."""

    input_gate: Linear | None = None  # [P, E]
    input_out: Linear | None = None  # [E, P]
    post_input_norm: Tensor | None = None
    layer_scale: Tensor | None = None  # [1]
    beside: ExpertsBeside | None = None

    @property
    def feeders(self) -> tuple[Any, ...]:
        return (*super().feeders, self.beside, self.input_gate, self.input_out)

    @property
    def has_keys(self) -> bool:
        return self.k_norm is not None

    def project(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor, Tensor, Tensor]:
        rows = plus(self.qkv(h), delta).unflatten(-1, (-1, self.head_dim))
        q, k, v = rows.tensor_split((self.heads, self.heads + self.kv_heads), 1)
        v = v if v.shape[1] else k
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.norm(q, self.q_norm), self.norm(k, self.k_norm), self.norm_value(v)

    def norm_value(self, v: Tensor) -> Tensor:
        return unit_norm(v, self.eps)

    def project_queries(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        """h [R, E] → q [R, H, D], before rotation."""
        assert self.q_norm is not None
        return (self.norm(plus(self.qkv(h), delta).unflatten(-1, (-1, self.head_dim)), self.q_norm),)

    @staticmethod
    def rotate_queries(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        return (rotate(q, cos, sin),)

    def run_experts(self, h: Tensor, *rows: Tensor, added: LayerAdapters | None = None, exact: bool) -> tuple[Tensor]:
        """What experts make of the residual h [R, E]."""
        b, x, own = self.beside, h, of_rows(added, *rows)
        assert b is not None
        h, kind = self.norm(x, b.expert_in_norm), self.description.activation
        y = b.experts.mix(h, b.experts.route(x, own), b.gate_up, b.down, kind, exact=exact, added=own)
        return (self.norm(y, b.expert_out_norm),)

    def add_both(self, x: Tensor, inner: Tensor, experts: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        """The residual plus the ordinary feed-forward and the experts."""
        assert self.beside is not None
        y = self.norm(plus(self.down(inner), delta), self.beside.dense_norm) + experts
        return (self._add(x, y, self.post_mlp_norm, None),)

    def token_part(self, x: Tensor, inputs: Tensor, added: LayerAdapters | None, *, exact: bool) -> Tensor:
        """What the layer takes of the token: x [R, E] decides, of inputs [R, P], what there is of it."""
        assert self.input_gate is not None
        assert self.input_out is not None
        assert self.post_input_norm is not None
        gate = with_added(self.input_gate(x), added, "input_gate", x)
        inner = super().activate(gate, self.description.activation, exact=exact) * inputs
        return self.norm(with_added(self.input_out(inner), added, "input_out", inner), self.post_input_norm)

    def add_token(
        self, x: Tensor, inputs: Tensor, *rows: Tensor, added: LayerAdapters | None = None, exact: bool
    ) -> tuple[Tensor]:
        return (x + self.token_part(x, inputs, of_rows(added, *rows), exact=exact),)


@dataclass(frozen=True, eq=False, kw_only=True)
class PerLayerDecoder(DescribedDecoder):
    """A decoder of such layers. A layer's share of the three weights of inputs is one after the other."""

    layers: tuple[PerLayerLayer, ...]  # type: ignore[assignment]
    token_inputs: Tensor | None = None  # [V', L P]
    input_projection: Tensor | None = None  # [L P, E]
    input_projection_norm: Tensor | None = None  # [P]

    def kv_layer(self, l: int) -> int:
        return self.config.kv_places[l]

    def layer(self, l: int, x: Tensor, mixing: Mixing) -> Tensor:
        x, layer, tile = super().layer(l, x, mixing), self.layers[l], mixing.tile
        if layer.input_gate is not None:
            added, rows = adding(mixing.step.adapters, l, x)
            add = partial(layer.add_token, added=added, exact=tile is not None)
            (x,) = by_rows(tile, add, x, self.inputs(l, mixing), *rows)
            mixing.mark("feed-forward")
        return x if layer.layer_scale is None else x * layer.layer_scale

    def inputs(self, l: int, mixing: Mixing) -> Tensor:
        """What a layer may take of each row's token, [T, P]."""
        weight = self.input_projection_norm
        assert weight is not None
        size, e, norm = len(weight), self.config.hidden_size, self.layers[0].norm
        own, (added, rows) = slice(l * size, (l + 1) * size), adding(mixing.step.adapters, l, mixing.embedded)

        def made(embedded: Tensor, *rows: Tensor) -> tuple[Tensor]:
            y = self.project_embedded(embedded, own)
            return (norm(with_added(y, of_rows(added, *rows), "input_projection", embedded) * e**-0.5, weight),)

        (projected,) = by_rows(mixing.tile, made, mixing.embedded, *rows)
        return (projected + self.token_rows(own, self.known(mixing.step.tokens)) * size**0.5) * 2**-0.5

    def project_embedded(self, embedded: Tensor, own: slice) -> Tensor:
        """A layer's part of what is made of embedded rows."""
        assert self.input_projection is not None
        return linear(embedded, self.input_projection[own])

    def token_rows(self, own: slice, tokens: Tensor) -> Tensor:
        """A layer's part of the rows of tokens."""
        assert self.token_inputs is not None
        return self.token_inputs[tokens, own]

    def known(self, tokens: Tensor) -> Tensor:
        """The rows of tokens in the table of inputs."""
        return tokens

    def attend(self, l: int, h: Tensor, mixing: Mixing) -> Tensor:
        layer, tile = self.layers[l], mixing.tile
        if layer.has_keys:
            return super().attend(l, h, mixing)
        (q,) = by_rows(tile, layer.project_queries, h, *mixing.step.delta(l, "qkv", h))
        mixing.mark("qkv")
        (q,) = by_rows(tile, layer.rotate_queries, q, *mixing.rotations[l])
        mixing.mark("rope")
        return self.attend_to_slots(l, q, mixing)

    def _feed_forward(self, l: int, x: Tensor, h: Tensor, step: DecoderInput, tile: int | None) -> Tensor:
        layer, exact = self.layers[l], tile is not None
        if layer.beside is None:
            return super()._feed_forward(l, x, h, step, tile)
        added, rows = adding(step.adapters, l, x)
        (experts,) = by_rows(tile, partial(layer.run_experts, added=added, exact=exact), x, *rows)
        (inner,) = by_rows(tile, partial(layer.gate_times_up, exact=exact), h, *step.delta(l, "gate_up", h))
        return by_rows(tile, layer.add_both, x, inner, experts, *step.delta(l, "down", inner))[0]

    def first_layers(self, count: int) -> PerLayerDecoder:
        few: Any = super().first_layers(count)
        if self.input_projection is None or self.token_inputs is None or self.input_projection_norm is None:
            return few
        own = slice(0, count * len(self.input_projection_norm))
        return replace(few, input_projection=self.input_projection[own], token_inputs=self.token_inputs[:, own])

    def nbytes(self) -> dict[str, int]:
        size = super().nbytes()
        size["feed-forward"] += bytes_of(self.input_projection, self.input_projection_norm)
        return {**size, "embed": size["embed"] + bytes_of(self.token_inputs)}

    def rows_of_each_kind(self, x: Tensor) -> list[Tensor]:
        kinds = {(layer.has_keys, layer.qkv.weight.shape, layer.down.weight.shape): layer for layer in self.layers}
        tensors = [self.head(x, None)]
        for layer in kinds.values():
            q, *kv = layer.project(x) if layer.has_keys else layer.project_queries(x)
            tensors += [*layer.norm_in(x), q, *kv, *layer.project_out(x, q), *layer.feed_forward(x, x, exact=True)]
            tensors += layer.run_experts(x, exact=True) if layer.beside is not None else ()
        return tensors
