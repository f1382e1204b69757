"""Encoders of the BERT family on variable-length batches: rows end to end, no padding, each row attends to itself.

The embeddings and the head are the model's own modules; the layers between are computed here, on the same weights, with
query, key and value in one matmul. `encoder(batch, reads)` returns what the model's own forward would, for the tokens
that are read: all, each row's first, or its marks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.base.dataclass import dataclass
from headway.pipelines.backends.linear import LinearFactory, LinearOp, OneDnnLinear, float_linear, round_rows
from headway.pipelines.backends.torch import TorchBackend, to_device
from headway.pipelines.inputs import arrays
from headway.pipelines.inputs.arrays import LengthGroup, concatenate, length_groups
from headway.pipelines.task import ModelInputs, Row

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
Reduce = Callable[[Any, ModelInputs], Mapping[str, "Tensor | arrays.Ragged"]]
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")  # positions start after the padding token's id


@dataclass(frozen=True, eq=False)
class EncoderLayer:
    """One post-norm layer: attention and feed-forward.

    The last layer has a separate `query` (`qkv` is then key and value): only tokens that are read need one.
    """

    qkv: LinearOp
    out: LinearOp
    norm1: nn.LayerNorm
    up: LinearOp
    down: LinearOp
    norm2: nn.LayerNorm
    query: LinearOp | None = None


def can_unpad(module: Any) -> bool:
    """Whether this module is an encoder that UnpaddedEncoder supports."""
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES or getattr(config, "is_decoder", False):
        return False
    plain = getattr(config, "position_embedding_type", "absolute") in ("absolute", None)
    return plain and not getattr(config, "chunk_size_feed_forward", 0)


class UnpaddedEncoder:
    """An encoder for unpadded batches."""

    def __init__(self, backend: TorchBackend, make: LinearFactory = float_linear) -> None:
        module: Any = backend.module
        config = module.config
        self._backend, self._module = backend, module
        self._base = getattr(module, module.base_model_prefix, module)
        self._family: str = config.model_type
        self._heads: int = config.num_attention_heads
        layers = list(_layers_of(self._base, self._family))
        self._layers = [_layer(layer, self._family, make) for layer in layers]
        self._last = _layer(layers[-1], self._family, make, separate_query=True)
        self._activation = activation_of(config)
        self._attend = attention_for(backend)
        self._pads_rows = isinstance(self._last.out, OneDnnLinear)
        self._head = _with_states(module) if self._base is not module else None
        self.takes_types = self._family != "distilbert"
        self.first_position = int(config.pad_token_id) + 1 if self._family in OFFSET_POSITIONS else 0

    def batch(self, rows: Sequence[Row]) -> ModelInputs:
        """The unpadded batch of these rows."""
        return concatenate(rows, self.takes_types, self.first_position)

    def compute(self, batch: ModelInputs, reads: str, reduce: Reduce, key: Hashable) -> Mapping[str, Any]:
        """`reduce` of the model's output; calls with an equal `key` have an equivalent `reduce` (None: unknown)."""
        return reduce(self(batch, reads), batch)

    def __call__(self, batch: ModelInputs, reads: str) -> Any:
        """The model's output for the tokens that are read: `first` as [R, …], all and marks as [1, N, …]."""
        layout = GroupedLayout(length_groups(batch.rows), self._backend.device)
        return self.read(to_device(batch.inputs, self._backend.device), layout, self.read_indices(batch, reads), reads)

    def read(self, inputs: Mapping[str, Tensor], layout: RowLayout, at: Tensor | None, reads: str) -> Any:
        """The model's output for the tokens at indices `at` of inputs [T] on the device; None: for all."""
        states = self.states(inputs, layout, at)
        return self._head_output(states.unsqueeze(1 if reads == "first" else 0), pool=reads == "first")

    def states(self, inputs: Mapping[str, Tensor], layout: RowLayout, at: Tensor | None = None) -> Tensor:
        """The final hidden states of the tokens at indices `at`, or of all, [N, H]."""
        names = [name for name in inputs if self.takes_types or name != "token_type_ids"]
        x = self._embed({name: inputs[name].unsqueeze(0) for name in names}).squeeze(0)
        total, x = len(x), self._pad_rows(x)
        for layer in self._layers[:-1]:
            x = self._layer(layer, x, layout)
        if at is None:
            return self._layer(self._layers[-1], x, layout)[:total]
        if len(at) == layout.rows:  # one token per row: the last layer needs no others
            return self._last_layer(x, self._pad_rows(x[at]), layout)[: len(at)]
        return self._layer(self._layers[-1], x, layout)[at]

    def read_indices(self, batch: ModelInputs, reads: str) -> Tensor | None:
        """Indices of the tokens that are read; None for all."""
        if reads == "all":
            return None
        indices: list[int] = []
        start = 0
        for row in batch.rows:
            indices += [start] if reads == "first" else [start + mark for mark in row.marks]
            start += row.length
        return to_device(torch.tensor(indices), self._backend.device)

    def _pad_rows(self, x: Tensor) -> Tensor:
        """`x` with zero rows up to a size that oneDNN has a kernel for."""
        return F.pad(x, (0, 0, 0, round_rows(len(x)) - len(x))) if self._pads_rows else x

    def _embed(self, inputs: dict[str, Tensor]) -> Tensor:
        x = self._base.embeddings(**inputs)
        project = getattr(self._base, "embeddings_project", None)
        return x if project is None else project(x)

    def _layer(self, layer: EncoderLayer, x: Tensor, layout: RowLayout) -> Tensor:
        return self._after_attention(layer, self._attend.all(layer.qkv(x), layout, self._heads), x)

    def _last_layer(self, x: Tensor, read: Tensor, layout: RowLayout) -> Tensor:
        """The last layer for one token of each row: x [T, H], read [R, H] → [R, H]."""
        assert self._last.query is not None
        attended = self._attend.one(self._last.query(read), self._last.qkv(x), layout, self._heads)
        return self._after_attention(self._last, attended, read)

    def _after_attention(self, layer: EncoderLayer, attended: Tensor, x: Tensor) -> Tensor:
        x = _normed(layer.norm1, layer.out.plus(attended, x))
        up = layer.up.gelu(x) if self._activation is None else self._activation(layer.up(x))
        return _normed(layer.norm2, layer.down.plus(up, x))

    def _head_output(self, states: Tensor, *, pool: bool) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooler = getattr(self._base, "pooler", None)
        pooled = pooler(states) if pool and pooler is not None else None
        output = BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)  # type: ignore[arg-type]
        if self._head is None:
            return output
        self._head._modules[self._module.base_model_prefix].output = output  # type: ignore[union-attr]
        return self._head(input_ids=torch.empty(states.shape[:2], dtype=torch.int64, device=states.device))


class _ComputedEncoder(nn.Module):
    """Replaces a head's encoder: returns hidden states that are computed already."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def _with_states(module: Any) -> Any:
    """`module` with its encoder replaced; parameters are shared and `module` stays unchanged."""
    head = copy.copy(module)
    head._modules = dict(module._modules)
    head._modules[module.base_model_prefix] = _ComputedEncoder()
    return head


def _normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def activation_of(config: Any) -> Callable[[Tensor], Tensor] | None:
    """The feed-forward activation; None for the exact GELU, which a LinearOp may fuse."""
    name = getattr(config, "hidden_act", None) or getattr(config, "activation", "gelu")
    if name == "gelu":
        return None
    from transformers.activations import ACT2FN

    return ACT2FN[name]


# -- weights -----------------------------------------------------------------------------------------------------------


def _layers_of(base: Any, family: str) -> Any:
    return base.transformer.layer if family == "distilbert" else base.encoder.layer


def _layer(layer: Any, family: str, make: LinearFactory, *, separate_query: bool = False) -> EncoderLayer:
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
    query, stacked = (_linear_op(parts[0], make), parts[1:]) if separate_query else (None, parts)
    weight = torch.cat([part.weight.data for part in stacked])
    bias = torch.cat([part.bias.data for part in stacked])
    return EncoderLayer(
        make(weight, bias),
        _linear_op(out, make),
        norms[0],
        _linear_op(up, make),
        _linear_op(down, make),
        norms[1],
        query,
    )


def _linear_op(linear: nn.Linear, make: LinearFactory) -> LinearOp:
    return make(linear.weight.data, linear.bias.data if linear.bias is not None else None)


# -- attention ---------------------------------------------------------------------------------------------------------


class GroupedLayout:
    """Where the rows of an unpadded batch are: as groups of one length, and as boundaries on the device."""

    def __init__(self, groups: Sequence[LengthGroup], device: torch.device) -> None:
        self.groups, self.device = groups, device

    @property
    def rows(self) -> int:
        return sum(g.rows for g in self.groups)

    @property
    def longest(self) -> int:
        return max(g.length for g in self.groups)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative row lengths from 0, [R + 1] int32."""
        boundaries = [0, *(g.start + (i + 1) * g.length for g in self.groups for i in range(g.rows))]
        return to_device(torch.tensor(boundaries, dtype=torch.int32), self.device)

    @cached_property
    def query_cu_seqlens(self) -> Tensor:
        """The boundaries of one token per row, [R + 1] int32."""
        return torch.arange(self.rows + 1, dtype=torch.int32, device=self.device)


class DeviceLayout:
    """The same for boundaries that are on the device already; `longest` may exceed the longest row."""

    def __init__(self, cu_seqlens: Tensor, longest: int) -> None:
        self.cu_seqlens, self.longest, self.rows = cu_seqlens, longest, len(cu_seqlens) - 1

    @cached_property
    def query_cu_seqlens(self) -> Tensor:
        return torch.arange(self.rows + 1, dtype=torch.int32, device=self.cu_seqlens.device)


RowLayout = GroupedLayout | DeviceLayout


class RowAttention(Protocol):
    """Attention within each row: for all tokens, qkv [T, 3·H·D] → [T, H·D]; for one per row, [R, H·D] → [R, H·D].

    Padding after the layout's last row has undefined values in the output.
    """

    def all(self, qkv: Tensor, layout: RowLayout, heads: int) -> Tensor: ...
    def one(self, query: Tensor, kv: Tensor, layout: RowLayout, heads: int) -> Tensor: ...


class PerLengthAttention:
    """One unmasked call for each group of rows with one length. On any device, in any dtype."""

    def all(self, qkv: Tensor, layout: RowLayout, heads: int) -> Tensor:
        assert isinstance(layout, GroupedLayout)
        width = qkv.shape[1] // 3
        parts = []
        for g in layout.groups:
            q, k, v = qkv[g.start : g.end].view(g.rows, g.length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v)  # [R, H, L, D]
            parts.append(attended.transpose(1, 2).reshape(-1, width))
        return _concatenate(parts, len(qkv))

    def one(self, query: Tensor, kv: Tensor, layout: RowLayout, heads: int) -> Tensor:
        assert isinstance(layout, GroupedLayout)
        width = query.shape[1]
        parts, first = [], 0
        for g in layout.groups:
            q = query[first : first + g.rows].view(g.rows, 1, heads, width // heads).transpose(1, 2)
            k, v = kv[g.start : g.end].view(g.rows, g.length, 2, heads, width // heads).permute(2, 0, 3, 1, 4)
            parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, width))
            first += g.rows
        return _concatenate(parts, len(query))


def _concatenate(parts: list[Tensor], rows: int) -> Tensor:
    """The parts concatenated, with zeros up to `rows`."""
    if missing := rows - sum(map(len, parts)):
        parts.append(parts[0].new_zeros(missing, parts[0].shape[1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class VarlenAttention:
    """One fused call for rows of any length: on a GPU, in half precision."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self._attend = attend

    def all(self, qkv: Tensor, layout: RowLayout, heads: int) -> Tensor:
        q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
        return self._attend(q, k, v, layout.cu_seqlens, layout.cu_seqlens, layout.longest, layout.longest).flatten(1)

    def one(self, query: Tensor, kv: Tensor, layout: RowLayout, heads: int) -> Tensor:
        k, v = kv.unflatten(1, (2, heads, -1)).unbind(1)
        q = query.unflatten(1, (heads, -1))
        return self._attend(q, k, v, layout.query_cu_seqlens, layout.cu_seqlens, 1, layout.longest).flatten(1)


def attention_for(backend: TorchBackend) -> RowAttention:
    """The attention for unpadded rows on this device."""
    config: Any = backend.module.config
    width = getattr(config, "hidden_size", 0) // max(getattr(config, "num_attention_heads", 1), 1)
    half = backend.placement.dtype in (torch.float16, torch.bfloat16)
    fused = _varlen() if backend.device.type == "cuda" and half and width % 8 == 0 and width <= 256 else None
    return PerLengthAttention() if fused is None else VarlenAttention(fused)


def _varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
