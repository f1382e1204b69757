"""The decoder: every supported family is this one, configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from headway.kernels.reference import kv as pages
from headway.kernels.reference import sampling
from headway.kernels.reference.attention import Group, attend, attend_exact, scores
from headway.kernels.reference.linear import by_rows, linear
from headway.kernels.reference.norm import rms_norm
from headway.kernels.reference.rope import rotation
from headway.models.config import ModelConfig
from headway.models.layers import Layer

Mark = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Step:
    """The tensors of one forward. `groups` has the attention plan for each window that occurs in the model."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    write_rows: Tensor | None  # [W] rows whose keys and values are kept; None for all
    write_slots: Tensor  # [W] physical slots
    groups: Mapping[int | None, Sequence[Group]]


@dataclass(eq=False)
class Taps:
    """What to look at on the way: rows of the residual before layer l (`hidden`), rows' attention in layer l."""

    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    scores: Mapping[int, Sequence[Group]] = field(default_factory=dict)
    hidden_found: dict[int, Tensor] = field(default_factory=dict)
    scores_found: dict[int, list[Tensor]] = field(default_factory=dict)

    def see_hidden(self, l: int, x: Tensor) -> None:
        if l in self.hidden:
            self.hidden_found[l] = x[self.hidden[l]].clone()

    def see_attention(self, l: int, q: Tensor, k: Tensor, scale: float) -> None:
        if l in self.scores:
            self.scores_found[l] = [scores(q, k, group, scale) for group in self.scores[l]]


@dataclass(frozen=True, eq=False)
class Decoder:
    """Token rows in, residual rows out; keys and values go to pages it is handed."""

    config: ModelConfig
    embedding: Tensor  # [V, E]
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [E]
    output: Tensor  # [V, E]; the embedding itself when tied. One in codes multiplies rows when called
    inv_freq: Tensor  # [rope dim / 2]

    @torch.inference_mode()
    def forward(self, step: Step, kv: tuple[Tensor, Tensor], taps: Taps, mark: Mark, tile: int | None) -> Tensor:
        """Residual rows [T, E] before the final norm. Keys and values are [L, P, page, Hkv, D] each.

        With a tile every row-wise part runs on exactly that many rows and attention sums in a fixed order: a row's
        bits then depend only on the row.
        """
        mix = attend if tile is None else attend_exact
        scale = self.config.head_dim**-0.5
        x = self.embedding[step.tokens]
        mark("embed")
        cos, sin = rotation(self.inv_freq, step.positions, self.config.rope.scale, x.dtype)
        mark("rope")
        for l, layer in enumerate(self.layers):
            taps.see_hidden(l, x)
            (h,) = by_rows(tile, layer.norm_in, x)
            mark("norm")
            q, k, v = by_rows(tile, layer.project, h)
            mark("qkv")
            q, k = by_rows(tile, layer.rotate, q, k, cos, sin)
            mark("rope")
            keep = slice(None) if step.write_rows is None else step.write_rows
            keys, values = kv[0][l], kv[1][l]
            pages.write(keys, step.write_slots, k[keep])
            pages.write(values, step.write_slots, v[keep])
            mark("kv write")
            mixed = mix(q, keys, values, step.groups[self.config.windows[l]], scale)
            mark("attention")
            taps.see_attention(l, q, keys, scale)
            (x,) = by_rows(tile, layer.project_out, x, mixed)
            mark("output projection")
            (h,) = by_rows(tile, layer.norm_mlp, x)
            mark("norm")
            (x,) = by_rows(tile, partial(layer.feed_forward, exact=tile is not None), x, h)
            mark("feed-forward")
        taps.see_hidden(len(self.layers), x)
        return x

    @torch.inference_mode()
    def finish(self, x: Tensor, tile: int | None) -> Tensor:
        """The final norm of residual rows [R, E]."""
        return by_rows(tile, lambda r: (rms_norm(r, self.final_norm, self.config.norm_eps),), x)[0]

    @torch.inference_mode()
    def head(self, h: Tensor, tile: int | None) -> Tensor:
        """Logits [R, V] float32 of normed rows [R, E]."""
        output = self.output
        times: Callable[[Tensor], Tensor] = output if callable(output) else partial(linear, weight=output)
        return by_rows(tile, lambda r: (times(r),), h)[0].float()

    def logits(self, x: Tensor, tile: int | None) -> Tensor:
        """Logits [R, V] float32 of residual rows [R, E]."""
        return self.head(self.finish(x, tile), tile)

    def best(self, logits: Tensor) -> tuple[list[bool], list[int] | None]:
        """For each row whether it has a NaN, and, where that comes with it, its first largest."""
        return logits.isnan().any(1).tolist(), None

    def choose(self, logits: Tensor, draws: Sequence[sampling.Draw]) -> list[int]:
        """The token drawn at each row."""
        return sampling.choose(logits, draws).tolist()

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
