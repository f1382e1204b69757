"""The decoder of a family with residuals side by side (Gemma 3n): AltUp, and a matrix product of low rank beside
attention.

Every layer predicts all streams [T, n, E] from what they were, computes the active one as an ordinary layer does, and
corrects the others by what that one got wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.specs.adapters import OUTSIDE
from headway.kernels.reference.linear import by_rows, linear
from headway.kernels.reference.lora import Delta
from headway.models.decoder import DecoderInput, MarkPhase, Mixing, on_hidden
from headway.models.described import bytes_of
from headway.models.description import AltUp
from headway.models.experts import LayerAdapters, adding, of_rows, with_added
from headway.models.hooks import Hooks
from headway.models.layers import Linear
from headway.models.variants.per_layer import PerLayerDecoder, PerLayerLayer

LEAST = 1e-5  # of a mean square that is divided by


@dataclass(frozen=True, eq=False, kw_only=True)
class AltUpLayer(PerLayerLayer):
    """A layer of one of several streams."""

    sparsity: float
    laurel_down: Linear  # [rank, E]
    laurel_up: Linear  # [E, rank]
    laurel_norm: Tensor
    altup_norm: Tensor
    altup_router: Linear  # [n, E]
    altup_predict: Linear  # [n n, n]
    altup_correct: Linear  # [n, n]
    altup_scale: Tensor  # [E]

    @property
    def feeders(self) -> tuple[Any, ...]:
        more = (self.laurel_down, self.laurel_up, self.altup_router, self.altup_predict, self.altup_correct)
        return (*super().feeders, *more)

    @property
    def altup(self) -> AltUp:
        assert self.description.altup is not None
        return self.description.altup

    def predict(self, streams: Tensor, *rows: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor]:
        """All streams [R, n, E] from what they were."""
        n, own = self.altup.streams, of_rows(added, *rows)
        kinds = self._kinds(streams[:, self.altup.active], own)
        shares = with_added(self.altup_predict(kinds), own, "altup_predict", kinds).unflatten(-1, (n, n))
        return (streams + self.total(shares[..., None] * streams[:, None]),)

    def correct(self, predicted: Tensor, x: Tensor, *rows: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor]:
        """All streams after the active one is computed to be x [R, E]."""
        missed, own = x - predicted[:, self.altup.active], of_rows(added, *rows)
        kinds = self._kinds(x, own)
        shares = with_added(self.altup_correct(kinds), own, "altup_correct", kinds) + 1.0
        return (predicted + shares[..., None] * missed[:, None],)

    def _kinds(self, x: Tensor, added: LayerAdapters | None) -> Tensor:
        """What decides how much streams have of each other, [R, n]."""
        h = self.norm(x, self.altup_norm) * x.shape[-1] ** -1.0
        return self.tanh(with_added(self.altup_router(h), added, "altup_router", h))

    def tanh(self, x: Tensor) -> Tensor:
        return torch.tanh(x.float()).to(x.dtype)

    def total(self, parts: Tensor) -> Tensor:
        """The sum over streams [R, n, n, E] → [R, n, E]."""
        return parts.sum(2)

    def low_rank(self, h: Tensor, *rows: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor]:
        """The low-rank product of normed rows h."""
        own = of_rows(added, *rows)
        low = with_added(self.laurel_down(h), own, "laurel_down", h)
        return (with_added(self.laurel_up(low), own, "laurel_up", low),)

    def add_attention(self, x: Tensor, h: Tensor, mixed: Tensor, raised: Tensor, *delta: Delta) -> tuple[Tensor]:
        """The residual with attention, and with the low-rank product of normed rows h."""
        (y,) = self.project_out(x, mixed, *delta)
        return ((y + h + self.norm(raised, self.laurel_norm)) / math.sqrt(2),)

    def activate(self, x: Tensor, kind: str, *, exact: bool) -> Tensor:
        if self.sparsity > 0:  # what is below the quantile that a normal distribution would have becomes 0
            x = self.cut_off(x, NormalDist().inv_cdf(self.sparsity))
        return super().activate(x, kind, exact=exact)

    def cut_off(self, x: Tensor, deviations: float) -> Tensor:
        """What is above the mean by so many standard deviations, and 0 for the rest."""
        wide = torch.std(x, dim=-1, keepdim=True, unbiased=False) * deviations
        return torch.relu(x - (x.mean(-1, keepdim=True) + wide))

    def add_token_to_others(
        self, streams: Tensor, inputs: Tensor, *rows: Tensor, added: LayerAdapters | None = None, exact: bool
    ) -> tuple[Tensor]:
        """All streams, those after the first with what the layer takes of the token."""
        active, own = streams[:, self.altup.active], of_rows(added, *rows)
        part = self.token_part(active * self.altup_scale if self.altup.scaled else active, inputs, own, exact=exact)
        return (torch.cat((streams[:, :1], streams[:, 1:] + part[:, None]), 1),)


@dataclass(frozen=True, eq=False, kw_only=True)
class AltUpDecoder(PerLayerDecoder):
    """A decoder of such layers. Hidden states are those of the active stream, and after the last layer of all."""

    layers: tuple[AltUpLayer, ...]  # type: ignore[assignment]
    altup_spread: Sequence[Tensor] | Tensor  # [n - 1, E, E]
    altup_gather: Sequence[Tensor] | Tensor  # [n - 1, E, E]

    @torch.inference_mode()
    def forward(
        self, step: DecoderInput, kv: tuple[Tensor, Tensor], hooks: Hooks, mark: MarkPhase, tile: int | None
    ) -> Tensor:
        x = self.embed(step.tokens, step.positions)
        added, rows = adding(step.adapters, OUTSIDE, x)
        (streams,) = by_rows(tile, partial(self.spread, added=added), x, *rows)
        mark("embed")
        mixing, how = Mixing(step, kv, self.rotations(step.positions), hooks, mark, tile, x), self.layers[0].altup
        mark("rope")
        for l in range(len(self.layers)):
            on_hidden(hooks, l, streams[:, how.active])
            streams = self.layer(l, streams, mixing)
        (x,) = by_rows(tile, partial(self.gather, added=added), streams, *rows)
        on_hidden(hooks, len(self.layers), x)
        return x

    def layer(self, l: int, x: Tensor, mixing: Mixing) -> Tensor:
        layer, tile, exact = self.layers[l], mixing.tile, mixing.tile is not None
        added, rows = adding(mixing.step.adapters, l, x)
        (predicted,) = by_rows(tile, partial(layer.predict, added=added), x, *rows)
        active = predicted[:, layer.altup.active]
        (h,) = by_rows(tile, layer.norm_in, active)
        mixing.mark("norm")
        active = self.mix(l, active, h, mixing)
        (h,) = by_rows(tile, layer.norm_mlp, active, active)
        mixing.mark("norm")
        active = self._feed_forward(l, active, h, mixing.step, tile)
        (x,) = by_rows(tile, partial(layer.correct, added=added), predicted, active, *rows)
        add = partial(layer.add_token_to_others, added=added, exact=exact)
        (x,) = by_rows(tile, add, x, self.inputs(l, mixing), *rows)
        mixing.mark("feed-forward")
        return x

    def mix(self, l: int, x: Tensor, h: Tensor, mixing: Mixing) -> Tensor:
        mixed, layer, tile = self.attend(l, h, mixing), self.layers[l], mixing.tile
        added, rows = adding(mixing.step.adapters, l, h)
        (raised,) = by_rows(tile, partial(layer.low_rank, added=added), h, *rows)
        (x,) = by_rows(tile, layer.add_attention, x, h, mixed, raised, *mixing.step.delta(l, "out", mixed))
        mixing.mark("output projection")
        return x

    def known(self, tokens: Tensor) -> Tensor:
        own = self.config.description.per_layer
        assert own is not None
        assert own.inputs is not None
        return torch.where(tokens < own.inputs.vocab, tokens, 0)  # a token without a row has that of 0

    def spread(self, x: Tensor, *rows: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor]:
        """The streams [R, n, E] of embedded rows: others are as large as the first."""
        own, count = of_rows(added, *rows), len(self.altup_spread)
        others = self._each(x, [x] * count, self.altup_spread, own, "altup_spread")
        return (torch.stack((x, *others), 1),)

    def gather(self, streams: Tensor, *rows: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor]:
        """The residual [R, E] of all streams: their mean, where they are as large as the first."""
        first, *others = streams.unbind(1)
        own = of_rows(added, *rows)
        return (self.mean([first, *self._each(first, others, self.altup_gather, own, "altup_gather")]),)

    def _each(
        self, first: Tensor, streams: list[Tensor], matrices: Any, added: LayerAdapters | None, stack: str
    ) -> list[Tensor]:
        """Streams [R, E] times a matrix of their own, as large as the first."""
        products = [
            with_added(self.product(x, matrix), added, f"{stack}.{k}", x)
            for k, (x, matrix) in enumerate(zip(streams, matrices, strict=True))
        ]
        return [self.as_large_as(first, y) for y in products]

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        return linear(x, matrix)

    def mean(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean(0)

    def as_large_as(self, x: Tensor, y: Tensor) -> Tensor:
        """y with the mean square of x, row by row."""
        size, own = (each.square().mean(-1, keepdim=True) for each in (x, y))
        return y * size.sqrt() / own.clamp(min=LEAST).sqrt()

    def nbytes(self) -> dict[str, int]:
        size = super().nbytes()
        spread, gather = bytes_of(self.altup_spread), bytes_of(self.altup_gather)
        return {**size, "embed": size["embed"] + spread, "head": size["head"] + gather}

    def rows_of_each_kind(self, x: Tensor) -> list[Tensor]:
        (streams,), layer = self.spread(x), self.layers[0]
        q = layer.project(x)[0]
        more = [streams, *self.gather(streams), *layer.predict(streams)]
        more += layer.add_attention(x, x, q, *layer.low_rank(x))
        return [*more, *layer.norm_in(x), q, *layer.feed_forward(x, x, exact=True), self.head(x, None)]
