"""Encoders of the BERT family over rows laid end to end: no padding is computed, every row attends to itself alone.

The embeddings and the head are the model's own modules; the layers between are computed here, on the same weights, with
query, key and value in one product. `PackedEncoder(batch, reads)` gives what the model's own forward would, for the
tokens that are read: all of them, each row's first, or its marks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.pipelines.backends.forward import Forward, to_device
from headway.pipelines.backends.linear import Blocked, Maker, Product, float_product, round_rows
from headway.pipelines.inputs import arrays
from headway.pipelines.inputs.arrays import Group, groups_of, pack
from headway.pipelines.task import Batch, Row

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
Reduce = Callable[[Any, Batch], Mapping[str, "Tensor | arrays.Ragged"]]
POSITIONED = ("roberta", "xlm-roberta", "camembert")  # whose positions begin behind the padding token


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: attention and feed-forward, each with its residual before its norm.

    The last layer has its query apart (`qkv` is then key and value): only tokens that are read need one.
    """

    qkv: Product
    out: Product
    norm1: nn.LayerNorm
    up: Product
    down: Product
    norm2: nn.LayerNorm
    query: Product | None = None


def can_pack(module: Any) -> bool:
    """Whether this module is an encoder that is computed here."""
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES or getattr(config, "is_decoder", False):
        return False
    plain = getattr(config, "position_embedding_type", "absolute") in ("absolute", None)
    return plain and not getattr(config, "chunk_size_feed_forward", 0)


class PackedEncoder:
    """The layers of an encoder for packed batches."""

    def __init__(self, run: Forward, make: Maker = float_product) -> None:
        module: Any = run.module
        config = module.config
        self._run, self._module = run, module
        self._base = getattr(module, module.base_model_prefix, module)
        self._family: str = config.model_type
        self._heads: int = config.num_attention_heads
        layers = list(_layers_of(self._base, self._family))
        self._layers = [_layer(layer, self._family, make) for layer in layers]
        self._last = _layer(layers[-1], self._family, make, apart=True)
        self._activation = activation_of(config)
        self._attend = attention_for(run)
        self._rounds = isinstance(self._last.out, Blocked)
        self._head = _with_states(module) if self._base is not module else None
        self.takes_types = self._family != "distilbert"
        self.first_position = int(config.pad_token_id) + 1 if self._family in POSITIONED else 0

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Rows as one packed batch."""
        return pack(rows, self.takes_types, self.first_position)

    def answered(self, batch: Batch, reads: str, reduce: Reduce, key: Hashable) -> Mapping[str, Any]:
        """What `reduce` makes of the model's output; batches of equal `key` are reduced alike (None: unknown)."""
        return reduce(self(batch, reads), batch)

    def __call__(self, batch: Batch, reads: str) -> Any:
        """The model's output for what is read of each row: `first` as [R, …], all and marks as [1, N, …]."""
        layout = Layout(groups_of(batch.rows), self._run.device)
        return self.read(to_device(batch.inputs, self._run.device), layout, self.places(batch, reads), reads)

    def read(self, inputs: Mapping[str, Tensor], layout: AnyLayout, at: Tensor | None, reads: str) -> Any:
        """The model's output for the tokens `at` these places of inputs [T] on the device; None: for all."""
        states = self.states(inputs, layout, at)
        return self._answer(states.unsqueeze(1 if reads == "first" else 0), pool=reads == "first")

    def states(self, inputs: Mapping[str, Tensor], layout: AnyLayout, at: Tensor | None = None) -> Tensor:
        """The final states of the tokens `at` these places, or of all, [N, H]."""
        names = [name for name in inputs if self.takes_types or name != "token_type_ids"]
        x = self._embed({name: inputs[name].unsqueeze(0) for name in names}).squeeze(0)
        total, x = len(x), self._rounded(x)
        for layer in self._layers[:-1]:
            x = self._layer(layer, x, layout)
        if at is None:
            return self._layer(self._layers[-1], x, layout)[:total]
        if len(at) == layout.rows:  # one of each row: nothing else of the last layer is needed
            return self._last_layer(x, self._rounded(x[at]), layout)[: len(at)]
        return self._layer(self._layers[-1], x, layout)[at]

    def places(self, batch: Batch, reads: str) -> Tensor | None:
        """Where in the packed batch the tokens are that are read; None for all."""
        if reads == "all":
            return None
        found: list[int] = []
        start = 0
        for row in batch.rows:
            found += [start] if reads == "first" else [start + mark for mark in row.marks]
            start += row.length
        return to_device(torch.tensor(found), self._run.device)

    def _rounded(self, x: Tensor) -> Tensor:
        """`x` with rows of zeros up to a number that products meet often."""
        return F.pad(x, (0, 0, 0, round_rows(len(x)) - len(x))) if self._rounds else x

    def _embed(self, inputs: dict[str, Tensor]) -> Tensor:
        x = self._base.embeddings(**inputs)
        project = getattr(self._base, "embeddings_project", None)
        return x if project is None else project(x)

    def _layer(self, layer: Layer, x: Tensor, layout: AnyLayout) -> Tensor:
        return self._rest(layer, self._attend.all(layer.qkv(x), layout, self._heads), x)

    def _last_layer(self, x: Tensor, read: Tensor, layout: AnyLayout) -> Tensor:
        """The last layer for one token of each row: x [T, H], read [R, H] → [R, H]."""
        assert self._last.query is not None
        mixed = self._attend.one(self._last.query(read), self._last.qkv(x), layout, self._heads)
        return self._rest(self._last, mixed, read)

    def _rest(self, layer: Layer, mixed: Tensor, x: Tensor) -> Tensor:
        x = _normed(layer.norm1, layer.out.plus(mixed, x))
        up = layer.up.gelu(x) if self._activation is None else self._activation(layer.up(x))
        return _normed(layer.norm2, layer.down.plus(up, x))

    def _answer(self, states: Tensor, *, pool: bool) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooler = getattr(self._base, "pooler", None)
        pooled = pooler(states) if pool and pooler is not None else None
        found = BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)  # type: ignore[arg-type]
        if self._head is None:
            return found
        self._head._modules[self._module.base_model_prefix].found = found  # type: ignore[union-attr]
        return self._head(input_ids=torch.empty(states.shape[:2], dtype=torch.int64, device=states.device))


class _States(nn.Module):
    """Stands where a head expects its encoder, and gives it states that are computed already."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.found


def _with_states(module: Any) -> Any:
    """`module` with its encoder replaced; parameters are shared, the module itself is not touched."""
    head = copy.copy(module)
    head._modules = dict(module._modules)
    head._modules[module.base_model_prefix] = _States()
    return head


def _normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def activation_of(config: Any) -> Callable[[Tensor], Tensor] | None:
    """The activation between the two feed-forward products; None for the exact GELU, which products compute."""
    name = getattr(config, "hidden_act", None) or getattr(config, "activation", "gelu")
    if name == "gelu":
        return None
    from transformers.activations import ACT2FN

    return ACT2FN[name]


# -- weights -----------------------------------------------------------------------------------------------------------


def _layers_of(base: Any, family: str) -> Any:
    return base.transformer.layer if family == "distilbert" else base.encoder.layer


def _layer(layer: Any, family: str, make: Maker, *, apart: bool = False) -> Layer:
    if family == "distilbert":
        a, f = layer.attention, layer.ffn
        linears = (a.q_lin, a.k_lin, a.v_lin), a.out_lin, f.lin1, f.lin2
        norms = layer.sa_layer_norm, layer.output_layer_norm
    else:
        a = layer.attention
        inner, outer = layer.intermediate.dense, layer.output
        linears = (a.self.query, a.self.key, a.self.value), a.output.dense, inner, outer.dense
        norms = a.output.LayerNorm, outer.LayerNorm
    parts, out, up, down = linears
    query, stacked = (_made(parts[0], make), parts[1:]) if apart else (None, parts)
    weight = torch.cat([part.weight.data for part in stacked])
    bias = torch.cat([part.bias.data for part in stacked])
    return Layer(make(weight, bias), _made(out, make), norms[0], _made(up, make), _made(down, make), norms[1], query)


def _made(linear: nn.Linear, make: Maker) -> Product:
    return make(linear.weight.data, linear.bias.data if linear.bias is not None else None)


# -- attention ---------------------------------------------------------------------------------------------------------


class Layout:
    """Where the rows of a packed batch lie: as runs of one length, and as boundaries on the device."""

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        self.groups, self.device = groups, device

    @property
    def rows(self) -> int:
        return sum(g.rows for g in self.groups)

    @property
    def longest(self) -> int:
        return max(g.length for g in self.groups)

    @cached_property
    def ends(self) -> Tensor:
        """0 and the end of each row, [R + 1] int32."""
        ends = [0, *(g.start + (i + 1) * g.length for g in self.groups for i in range(g.rows))]
        return to_device(torch.tensor(ends, dtype=torch.int32), self.device)

    @cached_property
    def ones(self) -> Tensor:
        """The boundaries of one token a row, [R + 1] int32."""
        return torch.arange(self.rows + 1, dtype=torch.int32, device=self.device)


class FixedLayout:
    """The same for a batch whose boundaries are on the device already; `longest` may be more than any row has."""

    def __init__(self, ends: Tensor, longest: int) -> None:
        self.ends, self.longest, self.rows = ends, longest, len(ends) - 1

    @cached_property
    def ones(self) -> Tensor:
        return torch.arange(self.rows + 1, dtype=torch.int32, device=self.ends.device)


AnyLayout = Layout | FixedLayout


class Attention(Protocol):
    """Attention within each row: for all tokens, qkv [T, 3·H·D] → [T, H·D]; for one a row, [R, H·D] → [R, H·D].

    Rows behind those of the layout are nobody's; there are as many of them in the answer, whatever they hold.
    """

    def all(self, qkv: Tensor, layout: AnyLayout, heads: int) -> Tensor: ...
    def one(self, query: Tensor, kv: Tensor, layout: AnyLayout, heads: int) -> Tensor: ...


class ByLength:
    """Rows of one length are one call, without a mask. On any device, in any dtype."""

    def all(self, qkv: Tensor, layout: AnyLayout, heads: int) -> Tensor:
        assert isinstance(layout, Layout)
        width = qkv.shape[1] // 3
        parts = []
        for g in layout.groups:
            q, k, v = qkv[g.start : g.end].view(g.rows, g.length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v)  # [R, H, L, D]
            parts.append(mixed.transpose(1, 2).reshape(-1, width))
        return _together(parts, len(qkv))

    def one(self, query: Tensor, kv: Tensor, layout: AnyLayout, heads: int) -> Tensor:
        assert isinstance(layout, Layout)
        width = query.shape[1]
        parts, first = [], 0
        for g in layout.groups:
            q = query[first : first + g.rows].view(g.rows, 1, heads, width // heads).transpose(1, 2)
            k, v = kv[g.start : g.end].view(g.rows, g.length, 2, heads, width // heads).permute(2, 0, 3, 1, 4)
            parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, width))
            first += g.rows
        return _together(parts, len(query))


def _together(parts: list[Tensor], rows: int) -> Tensor:
    """The parts one after another, with zeros up to `rows`."""
    if missing := rows - sum(map(len, parts)):
        parts.append(parts[0].new_zeros(missing, parts[0].shape[1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Ragged:
    """One fused call over rows of any length: a GPU, in half precision."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self._attend = attend

    def all(self, qkv: Tensor, layout: AnyLayout, heads: int) -> Tensor:
        q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
        return self._attend(q, k, v, layout.ends, layout.ends, layout.longest, layout.longest).flatten(1)

    def one(self, query: Tensor, kv: Tensor, layout: AnyLayout, heads: int) -> Tensor:
        k, v = kv.unflatten(1, (2, heads, -1)).unbind(1)
        q = query.unflatten(1, (heads, -1))
        return self._attend(q, k, v, layout.ones, layout.ends, 1, layout.longest).flatten(1)


def attention_for(run: Forward) -> Attention:
    """How packed rows attend on this device."""
    config: Any = run.module.config
    width = getattr(config, "hidden_size", 0) // max(getattr(config, "num_attention_heads", 1), 1)
    half = run.placement.dtype in (torch.float16, torch.bfloat16)
    fused = _varlen() if run.device.type == "cuda" and half and width % 8 == 0 and width <= 256 else None
    return ByLength() if fused is None else Ragged(fused)


def _varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
