"""New weights for a decoder of torch: floats, and matrices quantized for a CUDA device (see `update`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.base.errors import Unsupported
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.layers import DecoderLayer, Linear, mapped
from headway.models.shards import Split, VocabularyShard
from headway.models.weights.roles import HF_NAMES
from headway.models.weights.update import GivenWeights

BY_ROWS, BY_COLUMNS = ("q", "k", "v", "gate", "up"), ("o", "down")  # how ranks split the matrices of these roles
Part = tuple[str, int]  # the role of a matrix, and its rows


def moved(value: Any, device: torch.device) -> Any:
    """The same with its tensors on another device; what is shared stays shared."""
    return mapped(value, lambda tensor: tensor.to(device))


def dense(decoder: Decoder, given: GivenWeights) -> Decoder:
    n = HF_NAMES
    embedding: Any = _vocabulary(given.get(n["embedding"]), decoder.embedding)
    output: Any = decoder.output
    head = given.get(n["embedding" if decoder.config.tied else "output"])
    if isinstance(output, Tensor | VocabularyShard):
        output = embedding if decoder.output is decoder.embedding else _vocabulary(head, output)
    elif head is not None and (not decoder.config.tied or embedding is not decoder.embedding):
        output = _quantized(output, torch.as_tensor(head).to(decoder.embedding), None)
    return replace(
        decoder,
        embedding=embedding,
        layers=tuple([_dense_layer(layer, given, n["layer"].format(i)) for i, layer in enumerate(decoder.layers)]),
        final_norm=_like(given.get(n["final_norm"]), decoder.final_norm),
        output=output,
    )


def own_weights(given: Iterable[tuple[str, Any]], split: Split, config: ModelConfig) -> GivenWeights:
    """A rank's share of the weights of an update; `config` is that of the rank's layers."""
    return GivenWeights(config, {name: _share(name, torch.as_tensor(whole), split) for name, whole in given})


def _share(name: str, whole: Tensor, split: Split) -> Tensor:
    if name in (HF_NAMES["embedding"], HF_NAMES["output"]):
        return split.vocabulary(whole).weight
    role = next((role for role in (*BY_ROWS, *BY_COLUMNS) if f".{HF_NAMES[role]}." in name), None)
    if role in BY_ROWS:
        return split.part(whole)
    return split.part(whole, 1) if role in BY_COLUMNS and whole.ndim == 2 else whole


def _dense_layer(layer: DecoderLayer, given: GivenWeights, at: str) -> DecoderLayer:
    n, d = HF_NAMES, layer.head_dim
    heads, kv = layer.heads * d, layer.kv_heads * d
    inner, width = given.config.intermediate_size, given.config.hidden_size
    norms = {
        name: _like(given.get(at + n[name]), old)
        for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")
        if (old := getattr(layer, name)) is not None
    }
    return replace(
        layer,
        **norms,
        qkv=_stacked(layer.qkv, given, at, (("q", heads), ("k", kv), ("v", kv))),
        out=_stacked(layer.out, given, at, (("o", width),)),
        gate_up=_stacked(layer.gate_up, given, at, (("gate", inner), ("up", inner))),
        down=_stacked(layer.down, given, at, (("down", width),)),
    )


def _stacked(linear: Any, given: GivenWeights, at: str, parts: Sequence[Part]) -> Any:
    """A stacked matrix with the parts that are given."""
    names = [at + HF_NAMES[role] for role, _ in parts]
    weights = [given.get(f"{name}.weight") for name in names]
    biases = [given.get(f"{name}.bias") for name in names]
    if all(each is None for each in (*weights, *biases)):
        return linear
    rows = [count for _, count in parts]
    bias = None if linear.bias is None else _filled(linear.bias, biases, rows)
    if isinstance(linear, Linear):
        return replace(linear, weight=_filled(linear.weight, weights, rows), bias=bias)
    if all(weight is None for weight in weights):
        return replace(linear, bias=bias)
    missing = [name for name, weight in zip(names, weights, strict=True) if weight is None]
    if missing:
        raise Unsupported(
            f"{missing[0] + '.weight'!r} is quantized together with {names[0] + '.weight'!r}; give all of "
            f"{', '.join(role for role, _ in parts)} of a layer, or load the model without quantize="
        )
    like = linear.quants.device
    whole = torch.cat([torch.as_tensor(weight).to(like, linear.dtype) for weight in weights if weight is not None])
    return _quantized(linear, whole, bias)


def _filled(old: Tensor, parts: Sequence[Any], rows: Sequence[int]) -> Tensor:
    if all(part is None for part in parts):
        return old
    new = old.clone()
    for target, part in zip(new.split(list(rows)), parts, strict=True):
        if part is not None:
            target.copy_(torch.as_tensor(part))
    return new


def _quantized(old: Any, weight: Tensor, bias: Tensor | None) -> Any:
    from headway.models.quantized.cuda import quantize

    return quantize(weight.to(old.quants.device, old.dtype), bias, kind=old.kind, gated=old.gated)


def _vocabulary(new: Any, old: Any) -> Any:
    """A new embedding or output matrix, or a rank's share of one."""
    if isinstance(old, VocabularyShard):
        return replace(old, weight=_like(new, old.weight))
    return _like(new, old)


def _like(new: Any, old: Tensor) -> Tensor:
    """The new weight as the old one was kept: a copy, for the caller may go on training his."""
    return old if new is None else torch.empty_like(old).copy_(torch.as_tensor(new))
