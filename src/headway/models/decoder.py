"""The decoder: every supported model family is this one, configured.

Embedding, then layers of norm → qkv → rope → KV-cache write → paged attention → output projection → norm → MLP, then
the final norm and the logits. The tensor functions are in `kernels/reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.attention import AttentionGroup, Window
from headway.kernels.host.recurrent import StateGroup
from headway.kernels.reference import kv as pages
from headway.kernels.reference import ordered, sampling
from headway.kernels.reference.attention import attend, attend_exact, rounds_queries, scores
from headway.kernels.reference.linear import by_rows, linear
from headway.kernels.reference.lora import Delta
from headway.kernels.reference.rope import rotation
from headway.models.any_decoder import AnyDecoder
from headway.models.config import ModelConfig
from headway.models.hooks import Hooks
from headway.models.layers import DecoderLayer

MarkPhase = Callable[[str], None]  # ends a phase of the profile
Attention = Callable[..., Tensor]  # q, k, v, groups, scale, and what a layer's softmax has besides


@dataclass(frozen=True, eq=False)
class DecoderInput:
    """The tensors of one forward. `groups` has the attention groups for each window that occurs in the model."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    write_rows: Tensor | None  # [W] rows that go to the KV cache; None for all
    write_slots: Tensor  # [W] physical slots
    groups: Mapping[Window, Sequence[AttentionGroup]]
    adapters: RowAdapters | None = None
    states: Sequence[StateGroup] = ()  # of a model with recurrent layers, and where their state is
    state_pool: Tensor | None = None

    def delta(self, layer: int, stack: str, x: Tensor) -> tuple[Any, ...]:
        """What adapters add to a matmul of rows x, as the last arguments of a layer's function: none for nothing.

        It is a tensor wherever there are tiles.
        """
        delta = None if self.adapters is None else self.adapters.delta(layer, stack, x.flatten(1))
        return () if delta is None else (delta,)


class Mixing(NamedTuple):
    """What a layer takes besides its own rows."""

    step: DecoderInput
    kv: tuple[Tensor, Tensor]
    rotations: Sequence[tuple[Tensor, Tensor]]
    hooks: Hooks
    mark: MarkPhase
    tile: int | None
    embedded: Tensor  # [T, E] the residual before the first layer


class RowAdapters(Protocol):
    """The adapters of a forward's rows. A layer may be `OUTSIDE`: what a model has once."""

    def delta(self, layer: int, stack: str, x: Tensor, rows: Tensor | None = None) -> Delta | None:
        """What they add to a layer's matmul (qkv, out, gate_up or down) of rows x; None for nothing.

        x has all rows of the step, or these.
        """
        ...

    def expert_delta(self, layer: int, stack: str, x: Tensor, rows: Tensor, experts: Tensor) -> Delta | None:
        """The same for a matmul of each row with the matrix of its expert."""
        ...


@dataclass(frozen=True, eq=False)
class Decoder(AnyDecoder):
    """Token rows in, residual rows out; keys and values go to the KV cache it is given."""

    config: ModelConfig
    embedding: Tensor  # [V, E]
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor  # [E]
    output: Tensor  # [V, E]; the embedding itself when tied; callable when quantized
    inv_freq: Tensor  # [rope dim / 2]
    ordered: ClassVar[bool] = False  # whether every sum has a fixed order, so that a row needs no tile

    @torch.inference_mode()
    def forward(
        self, step: DecoderInput, kv: tuple[Tensor, Tensor], hooks: Hooks, mark: MarkPhase, tile: int | None
    ) -> Tensor:
        """Residual rows [T, E] before the final norm. `kv` is the KV cache: keys and values [L, P, page, Hkv, D].

        With a tile every row-wise function runs on exactly that many rows and attention sums in a fixed order, so
        that a row's bits depend only on the row.
        """
        x = self.embed(step.tokens, step.positions)
        mark("embed")
        mixing = Mixing(step, kv, self.rotations(step.positions), hooks, mark, tile, x)
        mark("rope")
        for l in range(len(self.layers)):
            on_hidden(hooks, l, x)
            x = self.layer(l, x, mixing)
        on_hidden(hooks, len(self.layers), x)
        return x

    def layer(self, l: int, x: Tensor, mixing: Mixing) -> Tensor:
        """The residual x [T, E] after a layer."""
        layer, tile, mark = self.layers[l], mixing.tile, mixing.mark
        (h,) = by_rows(tile, layer.norm_in, x)
        mark("norm")
        before, x = x, self.mix(l, x, h, mixing)
        (h,) = by_rows(tile, layer.norm_mlp, x, before)
        mark("norm")
        x = self._feed_forward(l, x, h, mixing.step, tile)
        mark("feed-forward")
        return x

    def mix(self, l: int, x: Tensor, h: Tensor, mixing: Mixing) -> Tensor:
        """The residual x [T, E] plus what a layer takes from other rows, for normed rows h."""
        mixed, layer = self.attend(l, h, mixing), self.layers[l]
        (x,) = by_rows(mixing.tile, layer.project_out, x, mixed, *mixing.step.delta(l, "out", mixed))
        mixing.mark("output projection")
        return x

    def attend(self, l: int, h: Tensor, mixing: Mixing) -> Tensor:
        """The attention [T, H, D] of normed rows h; their keys and values go to the KV cache."""
        step, layer, mark, tile = mixing.step, self.layers[l], mixing.mark, mixing.tile
        q, k, v = self.project(l, h, mixing)
        mark("qkv")
        q, k = by_rows(tile, layer.rotate, q, k, *mixing.rotations[l])
        mark("rope")
        keep = slice(None) if step.write_rows is None else step.write_rows
        keys, values = (part[self.kv_layer(l)] for part in mixing.kv)
        pages.write(keys, step.write_slots, k[keep])
        pages.write(values, step.write_slots, v[keep])
        mark("kv write")
        return self.attend_to_slots(l, q, mixing)

    def project(self, l: int, h: Tensor, mixing: Mixing) -> tuple[Tensor, ...]:
        """Queries, keys and values of normed rows h, before rotation."""
        return by_rows(mixing.tile, self.layers[l].project, h, *mixing.step.delta(l, "qkv", h))

    def attend_to_slots(self, l: int, q: Tensor, mixing: Mixing) -> Tensor:
        """The attention [T, H, D] of rotated queries q to the slots that each row sees."""
        layer, scale = self.layers[l], self.config.attention_scale
        keys, values = (part[self.kv_layer(l)] for part in mixing.kv)
        groups = mixing.step.groups[self.config.windows[l]]
        attention = ordered.attend if rounds_queries(q, keys) else self.attention(mixing.tile)
        mixed = attention(q, keys, values, groups, scale, **layer.softmax)
        mixing.mark("attention")
        on_attention(mixing.hooks, l, q, keys, scale, **layer.softmax)
        return mixed

    def kv_layer(self, l: int) -> int:
        """Where a layer's keys and values are in the KV cache."""
        return l

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Residual rows [T, E] of tokens [T] at positions [T]."""
        return self.embedding[tokens]

    def rotations(self, positions: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """For each layer cos and sin of every row's angles: positions [T] → two [T, 1, D]."""
        return [self.rotation(positions)] * len(self.layers)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every row's angles, the same in all layers."""
        return rotation(self.inv_freq, positions, self.config.rope.scale, self.dtype)

    def attention(self, tile: int | None) -> Attention:
        """What computes attention."""
        return attend if tile is None else attend_exact

    def _feed_forward(self, l: int, x: Tensor, h: Tensor, step: DecoderInput, tile: int | None) -> Tensor:
        layer, exact = self.layers[l], tile is not None
        if step.adapters is None:
            return by_rows(tile, partial(layer.feed_forward, exact=exact), x, h)[0]
        (inner,) = by_rows(tile, partial(layer.gate_times_up, exact=exact), h, *step.delta(l, "gate_up", h))
        return by_rows(tile, layer.add_down, x, inner, *step.delta(l, "down", inner))[0]

    @torch.inference_mode()
    def finish(self, x: Tensor, tile: int | None) -> Tensor:
        """The final norm of residual rows [R, E]."""
        return by_rows(tile, lambda r: (self.layers[0].norm(r, self.final_norm),), x)[0]

    @torch.inference_mode()
    def head(self, h: Tensor, tile: int | None) -> Tensor:
        """Logits [R, V] float32 of normed rows [R, E]."""
        return self.finish_logits(self.products(h, tile))

    @torch.inference_mode()
    def products(self, h: Tensor, tile: int | None) -> Tensor:
        """What the output matrix makes of normed rows [R, E], with its bias: [R, V] float32."""
        output = self.output
        matmul: Callable[[Tensor], Tensor] = output if callable(output) else partial(linear, weight=output)
        return by_rows(tile, lambda r: (matmul(r),), h)[0].float()

    def products_of(self, x: Tensor, tile: int | None) -> Tensor:
        """The same of residual rows [R, E]."""
        return self.products(self.finish(x, tile), tile)

    def finish_logits(self, products: Tensor) -> Tensor:
        """Logits of what `products` gave and adapters have added to."""
        return products

    def logits(self, x: Tensor, tile: int | None) -> Tensor:
        """Logits [R, V] float32 of residual rows [R, E]."""
        return self.head(self.finish(x, tile), tile)

    @property
    def functions(self) -> Any:
        """What reads its logits."""
        return sampling

    def best(self, logits: Tensor) -> tuple[list[bool], list[int] | None]:
        """Whether each row has a NaN, and its first largest token if that costs nothing more."""
        return logits.isnan().any(1).tolist(), None

    def sample(self, logits: Tensor, samplers: Sequence[sampling.RowSampler]) -> list[int]:
        """The token sampled at each row."""
        return sampling.sample(logits, samplers).tolist()

    def rows_of_each_kind(self, x: Tensor) -> list[Tensor]:
        """Rows x [R, E] through everything that treats every row alike, to try whether it does."""
        layer = self.layers[0]
        q, k, v = layer.project(x)
        (mlp,) = layer.feed_forward(x, x, exact=True)
        return [*layer.norm_in(x), q, k, v, *layer.project_out(x, q), mlp, self.head(x, None)]

    def first_layers(self, count: int) -> Decoder:
        """The first layers of the model, with its embedding and head."""
        return replace(self, config=self.config.first_layers(count), layers=self.layers[:count])

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def nbytes(self) -> Mapping[str, int]:
        """Weight bytes that one forward reads, by phase."""
        size = {"norm": self.final_norm.nbytes, "qkv": 0, "output projection": 0, "feed-forward": 0}
        for layer in self.layers:
            size["norm"] += layer.input_norm.nbytes + layer.mlp_norm.nbytes
            size["qkv"] += layer.qkv.nbytes + sum(n.nbytes for n in (layer.q_norm, layer.k_norm) if n is not None)
            size["output projection"] += layer.out.nbytes
            size["feed-forward"] += layer.gate_up.nbytes + layer.down.nbytes
        return {**size, "head": self.output.nbytes}


def on_hidden(hooks: Hooks, l: int, x: Tensor) -> None:
    """Keep the rows that the hooks want of the residual before layer l."""
    if l in hooks.hidden:
        hooks.hidden_out[l] = x[torch.from_numpy(hooks.hidden[l]).to(x.device)].clone()


def on_attention(hooks: Hooks, l: int, q: Tensor, k: Tensor, scale: float, **softmax: Any) -> None:
    """Compute the attention that the hooks want of layer l."""
    if l in hooks.scores:
        groups = [group_on(q.device, group) for group in hooks.scores[l]]
        hooks.scores_out[l] = [scores(q, k, group, scale, **softmax)[0] for group in groups]


def group_on(device: torch.device, group: AttentionGroup) -> AttentionGroup:
    """An attention group of arrays as one of tensors."""
    arrays = (group.rows, group.pages, group.numbers, group.mask)
    return AttentionGroup(*(torch.from_numpy(a).to(device) for a in arrays))


def states_on(device: torch.device, group: StateGroup) -> StateGroup:
    """A group of runs of arrays as one of tensors."""
    arrays = (group.rows, group.sources, group.targets)
    return StateGroup(*(torch.from_numpy(a).to(device) for a in arrays))
