"""The decoder of a family that is not Llama's: the same forward, with what its description says.

`DescribedLayer` has the functions of `DecoderLayer`, so `Decoder.forward` calls either. Experts are in `experts`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.attention import capped
from headway.kernels.reference.linear import by_rows
from headway.kernels.reference.lora import Delta, plus
from headway.kernels.reference.mlp import activate
from headway.kernels.reference.norm import layer_norm, rms_norm
from headway.kernels.reference.rope import rotation
from headway.models.decoder import Decoder, DecoderInput
from headway.models.description import Description
from headway.models.experts import ExpertWeights, LayerAdapters, adding, of_rows
from headway.models.layers import DecoderLayer, tensors_of


@dataclass(frozen=True, eq=False, kw_only=True)
class DescribedLayer(DecoderLayer):
    """A layer as its description has it.

    `input_norm` and `mlp_norm` are those before attention and feed-forward; where there are none, or one for both, the
    missing one is the layer's other norm and not used. Without a gate, `gate_up` is up alone; with experts, `gate_up`
    and `down` have a leading dimension for them.
    """

    description: Description
    experts: ExpertWeights | None = None
    input_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_attention_norm_bias: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    post_mlp_norm_bias: Tensor | None = None
    sinks: Tensor | None = None  # [H]

    @property
    def projections(self) -> tuple[Any, ...]:
        """The weights that make queries, keys and values."""
        return self.qkv, self.q_norm, self.k_norm

    @property
    def feeders(self) -> tuple[Any, ...]:
        """The weights of the feed-forward."""
        return self.gate_up, self.down, self.experts

    @property
    def softmax(self) -> dict[str, Any]:
        cap, sinks = self.description.attention_cap, self.sinks
        return {k: v for k, v in (("cap", cap), ("sinks", sinks)) if v is not None}

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        match self.description.norm:
            case "rms":
                return rms_norm(x, weight, self.eps)
            case "rms+1":
                return rms_norm(x, weight, self.eps, offset=1.0)
            case "layer":
                return layer_norm(x, weight, bias, self.eps)

    def norm_in(self, x: Tensor) -> tuple[Tensor]:
        after = self.description.norm_place == "after"
        return (x if after else self.norm(x, self.input_norm, self.input_norm_bias),)

    def project(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor, Tensor, Tensor]:
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = plus(self.qkv(h), delta).split(widths, dim=-1)
        return self._heads(q, self.q_norm), self._heads(k, self.k_norm), self._heads(v, None)

    def _heads(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        """Rows of queries, keys or values by head, normed and clipped."""
        by_row, clip = self.description.qk_norm == "row", self.description.qkv_clip
        if weight is not None and by_row:
            rows = self.norm(rows, weight)
        rows = rows if clip is None else rows.clamp(-clip, clip)
        heads = rows.unflatten(-1, (-1, self.head_dim))
        return heads if weight is None or by_row else self.norm(heads, weight)

    def project_out(self, x: Tensor, mixed: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        y, norm, bias = self.out(mixed.flatten(1)), self.post_attention_norm, self.post_attention_norm_bias
        if self._adds_plainly(norm) and not self.description.parallel:
            return (plus(x + y, delta),)
        return (self._add(x, plus(y, delta), norm, bias),)

    def norm_mlp(self, x: Tensor, before: Tensor) -> tuple[Tensor]:
        d = self.description
        x = before if d.parallel else x
        if d.norm_place == "after":
            return (x,)
        if d.one_norm:
            return (self.norm(x, self.input_norm, self.input_norm_bias),)
        return (self.norm(x, self.mlp_norm, self.mlp_norm_bias),)

    def run_experts(self, h: Tensor, *rows: Tensor, added: LayerAdapters | None, exact: bool) -> tuple[Tensor]:
        """What experts make of normed rows h [R, E]; with what adapters add, which rows of the step they are."""
        assert self.experts is not None
        kind, own = self.description.activation, of_rows(added, *rows)
        return (self.experts(h, self.gate_up, self.down, kind, exact=exact, added=own),)

    def gate_times_up(self, h: Tensor, delta: Delta | None = None, *, exact: bool) -> tuple[Tensor]:
        """What `add_down` takes: with experts, their whole output."""
        if self.experts is not None:
            return self.run_experts(h, added=None, exact=exact)
        rows, kind = plus(self.gate_up(h), delta), self.description.activation
        if not self.description.gated:
            return (self.activate(rows, kind, exact=exact),)
        gate, up = rows.chunk(2, dim=-1)
        return (self.activate(gate, kind, exact=exact) * up,)

    def activate(self, x: Tensor, kind: str, *, exact: bool) -> Tensor:
        return activate(x, kind, exact=exact)

    def add_down(self, x: Tensor, inner: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        norm, bias = self.post_mlp_norm, self.post_mlp_norm_bias
        y = inner if self.experts is not None else self.down(inner)
        if self._adds_plainly(norm):
            return (plus(x + y, delta),)
        return (self._add(x, plus(y, delta), norm, bias),)

    def _adds_plainly(self, norm: Tensor | None) -> bool:
        """Whether a matmul is added to the residual as it is: what adapters add to it then comes last."""
        return norm is None and self.description.residual_scale == 1.0

    def _add(self, x: Tensor, y: Tensor, norm: Tensor | None, bias: Tensor | None) -> Tensor:
        y = y if norm is None else self.norm(y, norm, bias)
        return x + (y if self.description.residual_scale == 1.0 else y * self.description.residual_scale)


@dataclass(frozen=True, eq=False, kw_only=True)
class DescribedDecoder(Decoder):
    """Embedding, layers and head as the description has them. `inv_freq` [L, D/2] has a row for each layer."""

    layers: tuple[DescribedLayer, ...]  # type: ignore[assignment]
    final_norm_bias: Tensor | None = None
    output_bias: Tensor | None = None
    positions: Tensor | None = None  # [max positions, E]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x, scale = super().embed(tokens, positions), self.config.description.embedding_scale
        if scale != 1.0:
            x = x * torch.tensor(scale, dtype=x.dtype, device=x.device)  # rounded as the weights are
        return x if self.positions is None else x + self.positions[positions]

    def rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        ropes = self.config.description.ropes or (self.config.rope,) * self.config.layers
        by_rope: dict[Any, tuple[Tensor, Tensor]] = {}
        for l, rope in enumerate(ropes):
            if rope not in by_rope:
                scale, width = (rope.scale, rope.dim // 2) if rope.dim else (1.0, None)
                by_rope[rope] = self.cos_sin(self.inv_freq[l, :width], positions, scale)
        return [by_rope[rope] for rope in ropes]

    def cos_sin(self, inv_freq: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """cos and sin of a layer's angles."""
        return rotation(inv_freq, positions, scale, self.dtype)

    def _feed_forward(self, l: int, x: Tensor, h: Tensor, step: DecoderInput, tile: int | None) -> Tensor:
        layer, exact = self.layers[l], tile is not None
        if layer.experts is None or step.adapters is None:
            return super()._feed_forward(l, x, h, step, tile)
        added, rows = adding(step.adapters, l, h)
        (y,) = by_rows(tile, partial(layer.run_experts, added=added, exact=exact), h, *rows)
        return by_rows(tile, layer.add_down, x, y)[0]

    def finish(self, x: Tensor, tile: int | None) -> Tensor:
        layer: Any = self.layers[0]
        return by_rows(tile, lambda r: (layer.norm(r, self.final_norm, self.final_norm_bias),), x)[0]

    def products(self, h: Tensor, tile: int | None) -> Tensor:
        rows, bias = super().products(h, tile), self.output_bias
        return rows if bias is None else rows + bias.float()

    def finish_logits(self, products: Tensor) -> Tensor:
        d = self.config.description
        return self.capped(products if d.logit_scale == 1.0 else products * d.logit_scale, d.logit_cap)

    def capped(self, logits: Tensor, cap: float | None) -> Tensor:
        return capped(logits, cap)

    def nbytes(self) -> dict[str, int]:
        size = {"norm": bytes_of(self.final_norm, self.final_norm_bias), "qkv": 0, "output projection": 0}
        size["feed-forward"] = 0
        for layer in self.layers:
            parts = {
                "qkv": bytes_of(*layer.projections),
                "output projection": bytes_of(layer.out),
                "feed-forward": bytes_of(*layer.feeders),
            }
            parts["norm"] = bytes_of(layer) - sum(parts.values())
            size = {phase: size[phase] + parts[phase] for phase in size}
        return {**size, "head": bytes_of(self.output, self.output_bias), "embed": bytes_of(self.positions)}

    def first_layers(self, count: int) -> DescribedDecoder:
        few = self.config.first_layers(count)
        return replace(self, config=few, layers=self.layers[:count], inv_freq=self.inv_freq[:count])


def bytes_of(*parts: Any) -> int:
    """Bytes of every tensor in them, each once."""
    return sum(tensor.nbytes for tensor in tensors_of(parts))
