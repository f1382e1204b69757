"""The decoder of a family with recurrent layers: the described decoder, with a mixer in place of attention in some.

The recurrent state of all sequences is one array, the state pool [places, recurrent layers, numbers of a layer]; place
0 is the state before the first token. The rows of a step come in groups of runs (`StateGroup`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.recurrent import StateGroup
from headway.kernels.reference.linear import by_rows
from headway.kernels.reference.lora import Delta, plus
from headway.kernels.reference.recurrent import sigmoid
from headway.models.decoder import DecoderInput, Mixing
from headway.models.described import DescribedDecoder, DescribedLayer
from headway.models.layers import Linear
from headway.models.recurrent import Mixer


@dataclass(frozen=True, eq=False, kw_only=True)
class HybridLayer(DescribedLayer):
    """A layer with a mixer, attention or both. What it does not have is an empty matrix."""

    mixer: Any = None  # a Mixer; None in a layer of attention alone
    attention_gate: Linear | None = None  # [H D, E]

    @property
    def attends(self) -> bool:
        return self.qkv.nbytes > 0

    @property
    def feeds(self) -> bool:
        """Whether it has a feed-forward."""
        return self.experts is not None or self.down.nbytes > 0

    def gated_heads(self, mixed: Tensor, h: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        """What attention gave [R, H, D] times the gate of each."""
        assert self.attention_gate is not None
        return (mixed * sigmoid(plus(self.attention_gate(h), delta)).view_as(mixed),)

    def add_mixed(self, x: Tensor, rows: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        """The residual x [R, E] plus what the mixer gave."""
        y = plus(self.mixer.mix_out(rows), delta)
        return (self._add(x, y, self.post_attention_norm, self.post_attention_norm_bias),)

    def norm_mlp(self, x: Tensor, before: Tensor) -> tuple[Tensor]:
        return super().norm_mlp(x, before) if self.feeds else (x,)


@dataclass(frozen=True, eq=False, kw_only=True)
class HybridDecoder(DescribedDecoder):
    """A decoder whose layers have attention, a recurrence or both."""

    layers: tuple[HybridLayer, ...]  # type: ignore[assignment]

    def kv_layer(self, l: int) -> int:
        return self.config.kv_layers.index(l)

    def mix(self, l: int, x: Tensor, h: Tensor, mixing: Mixing) -> Tensor:
        layer, tile = self.layers[l], mixing.tile
        if layer.attends:
            mixed = self.attend(l, h, mixing)
            if layer.attention_gate is not None:
                (mixed,) = by_rows(tile, layer.gated_heads, mixed, h, *mixing.step.delta(l, "attention_gate", h))
            (x,) = by_rows(tile, layer.project_out, x, mixed, *mixing.step.delta(l, "out", mixed))
            mixing.mark("output projection")
        if layer.mixer is not None:
            rows, *gate = by_rows(tile, layer.mixer.project, h, *mixing.step.delta(l, "mix_in", h))
            mixing.mark("mixer projection")
            outputs = self._advance(l, layer.mixer, rows, mixing.step, exact=tile is not None)
            mixing.mark("recurrence")
            finish = partial(layer.mixer.finish, exact=tile is not None)
            (rows,) = by_rows(tile, finish, outputs.to(h.dtype), *gate)
            (x,) = by_rows(tile, layer.add_mixed, x, rows, *mixing.step.delta(l, "mix_out", rows))
            mixing.mark("output projection")
        return x

    def _advance(self, l: int, mixer: Mixer, rows: Tensor, step: DecoderInput, *, exact: bool) -> Tensor:
        """The outputs of a recurrence for every row, each sequence from its own state to the next."""
        assert step.state_pool is not None
        pool, outputs = step.state_pool[:, self.config.recurrent_layers.index(l)], None
        for group in _one_by_one(step.states) if exact else step.states:
            mixed, state = mixer.advance(rows[group.rows], pool[group.sources], exact=exact)
            pool[group.targets] = state
            if outputs is None:
                outputs = torch.empty(len(rows), *mixed.shape[2:], dtype=mixed.dtype, device=mixed.device)
            outputs[group.rows] = mixed
        assert outputs is not None
        return outputs

    def _feed_forward(self, l: int, x: Tensor, h: Tensor, step: DecoderInput, tile: int | None) -> Tensor:
        return super()._feed_forward(l, x, h, step, tile) if self.layers[l].feeds else x

    def rows_of_each_kind(self, x: Tensor) -> list[Tensor]:
        kinds = {(layer.attends, layer.mixer is not None, layer.experts is not None): layer for layer in self.layers}
        tensors = [self.head(x, None)]
        for layer in kinds.values():
            tensors += layer.norm_in(x)
            if layer.attends:
                q, k, v = layer.project(x)
                tensors += [q, k, v, *layer.project_out(x, q)]
            if layer.mixer is not None:
                tensors += layer.mixer.project(x)
            if layer.feeds:
                tensors += layer.feed_forward(x, x, exact=True)
        return tensors

    def first_layers(self, count: int) -> HybridDecoder:
        few = self.config.first_layers(count)
        return replace(self, config=few, layers=self.layers[:count], inv_freq=self.inv_freq[:count])


def _one_by_one(groups: Sequence[StateGroup]) -> list[StateGroup]:
    """The same rows one at a time: what a row's bits are does not depend on how many others there are."""
    tensors = []
    for group in groups:
        for run in range(len(group.rows)):
            source, target = group.sources[run : run + 1], group.targets[run : run + 1]
            for row in range(group.rows.shape[1]):
                tensors.append(StateGroup(group.rows[run : run + 1, row : row + 1], source, target))
                source = target
    return tensors
