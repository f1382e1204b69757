"""New weights for a loaded decoder, by the names that they have in Hugging Face folders. Nothing is changed in place.

Each matrix keeps the format that it has: floats their type; int8, int4 and fp8 are quantized again. Weights may be
shared by engines and be views of a file, so a changed matrix is a new one and the others are taken over.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.kernels.reference.quantized import (
    FLOATS,
    QuantizedMatrix,
    interleave_floats,
    quantize_int4,
    quantize_int8,
)
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.families import is_llama_like
from headway.models.layers import DecoderLayer, Linear, mapped
from headway.models.load import HARMLESS, HF_NAMES
from headway.models.quantized.cpu import QuantizedDecoder, QuantizedLayer

Part = tuple[str, int]  # the role of a matrix, and its rows


def updated(
    decoder: Decoder | QuantizedDecoder, tensors: Mapping[str, Any], quantize: str | None = None
) -> Decoder | QuantizedDecoder:
    """The decoder with these weights in place of its own; all of them are checked before anything is made."""
    if not is_llama_like(decoder.config):
        raise Unsupported(f"weights of the {decoder.config.family} family cannot be updated in place; load them anew")
    given = _Given(decoder.config, tensors)
    given.check()
    if isinstance(decoder, QuantizedDecoder):
        return _Packed(given, quantize).decoder(decoder)
    return _dense(decoder, given)


def moved(value: Any, device: torch.device) -> Any:
    """The same with its tensors on another device; what is shared stays shared."""
    return mapped(value, lambda tensor: tensor.to(device))


class _Given:
    """The weights of an update, by name."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Any]) -> None:
        if not isinstance(tensors, Mapping):
            raise WrongType(f"the weights are {short_repr(tensors)}; they must be a mapping from names to tensors")
        self.config = config
        self._tensors = {name: _tensor(name, value) for name, value in tensors.items() if not _is_harmless(name)}
        self._tensors |= {name: _tensor(name, tensors[name]) for name in ("lm_head.weight",) if name in tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def check(self) -> None:
        """Raise for a name or shape that the model does not have, or a weight that is not a number."""
        shapes = weight_shapes(self.config)
        for name, tensor in self._tensors.items():
            if name not in shapes:
                near = difflib.get_close_matches(str(name), shapes, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "names are those of a Hugging Face folder"
                raise InvalidInput(f"{short_repr(name)} is not a weight of this model; {hint}")
            if tuple(tensor.shape) != shapes[name]:
                raise InvalidInput(
                    f"the weight {name!r} has shape {list(tensor.shape)}; this model needs {list(shapes[name])}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise InvalidInput(f"the weight {name!r} has values that are not finite numbers")
        head, table = self.get(HF_NAMES["output"]), self.get(HF_NAMES["embedding"])
        if self.config.tied and head is not None and (table is None or not torch.equal(head.to(table), table)):
            raise InvalidInput(
                f"{HF_NAMES['output']!r} is tied to {HF_NAMES['embedding']!r} in this model; "
                "give that one, or both alike"
            )


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights of a model, by name, with their shapes."""
    c, n = config, HF_NAMES
    e, f, d, q, kv = c.hidden_size, c.intermediate_size, c.head_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {n["embedding"]: (c.vocab_size, e), n["final_norm"]: (e,)}
    shapes[n["output"]] = (c.vocab_size, e)
    matrices = (
        ("q", q, e, c.qkv_bias), ("k", kv, e, c.qkv_bias), ("v", kv, e, c.qkv_bias), ("o", e, q, c.o_bias),
        ("gate", f, e, c.mlp_bias), ("up", f, e, c.mlp_bias), ("down", e, f, c.mlp_bias),
    )  # fmt: skip
    for i in range(c.layers):
        at = n["layer"].format(i)
        shapes |= {at + n[norm]: (e,) for norm in ("input_norm", "mlp_norm")}
        shapes |= {at + n[norm]: (d,) for norm in ("q_norm", "k_norm") if c.qk_norm}
        for role, rows, width, bias in matrices:
            shapes[f"{at}{n[role]}.weight"] = (rows, width)
            if bias:
                shapes[f"{at}{n[role]}.bias"] = (rows,)
    return shapes


def _tensor(name: object, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise WrongType(f"the weight {short_repr(name)} is {kind}; it must be a tensor or an array of floats")
    return value.detach()


def _is_harmless(name: object) -> bool:
    return isinstance(name, str) and HARMLESS.fullmatch(name) is not None


# -- floats, and matrices quantized for a CUDA device ------------------------------------------------------------------


def _dense(decoder: Decoder, given: _Given) -> Decoder:
    n = HF_NAMES
    embedding = _like(given.get(n["embedding"]), decoder.embedding)
    output: Any = decoder.output
    head = embedding if decoder.config.tied else given.get(n["output"])
    if isinstance(output, Tensor):
        output = embedding if decoder.output is decoder.embedding else _like(head, output)
    elif head is not None and (not decoder.config.tied or embedding is not decoder.embedding):
        output = _quantized(output, head.to(decoder.embedding), None)
    return replace(
        decoder,
        embedding=embedding,
        layers=tuple([_dense_layer(layer, given, n["layer"].format(i)) for i, layer in enumerate(decoder.layers)]),
        final_norm=_like(given.get(n["final_norm"]), decoder.final_norm),
        output=output,
    )


def _dense_layer(layer: DecoderLayer, given: _Given, at: str) -> DecoderLayer:
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


def _stacked(linear: Any, given: _Given, at: str, parts: Sequence[Part]) -> Any:
    """A stacked matrix with the parts that are given."""
    names = [at + HF_NAMES[role] for role, _ in parts]
    weights = [given.get(f"{name}.weight") for name in names]
    biases = [given.get(f"{name}.bias") for name in names]
    if all(each is None for each in (*weights, *biases)):
        return linear
    rows = [count for _, count in parts]
    bias = None if linear.bias is None else _filled(linear.bias, biases, rows)
    if isinstance(linear, Linear):
        return Linear(_filled(linear.weight, weights, rows), bias)
    if all(weight is None for weight in weights):
        return replace(linear, bias=bias)
    missing = [name for name, weight in zip(names, weights, strict=True) if weight is None]
    if missing:
        raise Unsupported(
            f"{missing[0] + '.weight'!r} is quantized together with {names[0] + '.weight'!r}; give all of "
            f"{', '.join(role for role, _ in parts)} of a layer, or load the model without quantize="
        )
    like = linear.quants.device
    whole = torch.cat([weight.to(like, linear.dtype) for weight in weights if weight is not None])
    return _quantized(linear, whole, bias)


def _filled(old: Tensor, parts: Sequence[Tensor | None], rows: Sequence[int]) -> Tensor:
    if all(part is None for part in parts):
        return old
    new = old.clone()
    for target, part in zip(new.split(list(rows)), parts, strict=True):
        if part is not None:
            target.copy_(part)
    return new


def _quantized(old: Any, weight: Tensor, bias: Tensor | None) -> Any:
    from headway.kernels.triton.quantized import quantize

    return quantize(weight.to(old.quants.device, old.dtype), bias, kind=old.kind, gated=old.gated)


def _like(new: Tensor | None, old: Tensor) -> Tensor:
    """The new weight as the old one was kept: a copy, for the caller may go on training his."""
    return old if new is None else torch.empty_like(old).copy_(new)


# -- the native step's layout ------------------------------------------------------------------------------------------


class _Packed:
    def __init__(self, given: _Given, quantize: str | None) -> None:
        self._given, self._quantize = given, quantize

    def decoder(self, decoder: QuantizedDecoder) -> QuantizedDecoder:
        n = HF_NAMES
        table = self._given.get(n["embedding"])
        embedding = self._matrix(decoder.embedding, n["embedding"], table, None)
        output = embedding
        if decoder.output is not decoder.embedding:
            head = self._given.get(n["output"]) if not decoder.config.tied else table
            output = self._matrix(decoder.output, n["output"], head, None)
        return replace(
            decoder,
            embedding=embedding,
            layers=tuple([self._layer(layer, n["layer"].format(i)) for i, layer in enumerate(decoder.layers)]),
            final_norm=_like(self._given.get(n["final_norm"]), decoder.final_norm),
            output=output,
        )

    def _layer(self, layer: QuantizedLayer, at: str) -> QuantizedLayer:
        n, given = HF_NAMES, self._given
        norms = {
            name: _like(given.get(at + n[name]), old)
            for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")
            if (old := getattr(layer, name)) is not None
        }
        parts = {}
        for role in ("q", "k", "v", "o", "gate", "up", "down"):
            name = at + n[role]
            weight, bias = given.get(f"{name}.weight"), given.get(f"{name}.bias")
            parts[role] = self._matrix(getattr(layer, role), f"{name}.weight", weight, bias)
        return replace(layer, **norms, **parts)

    def _matrix(self, old: QuantizedMatrix, name: str, weight: Tensor | None, bias: Tensor | None) -> QuantizedMatrix:
        kept = old.bias if bias is None else bias.float().cpu().contiguous().clone()
        if weight is None:
            return old if bias is None else replace(old, bias=kept)
        weight = weight.cpu()
        if old.kind in FLOATS:
            return interleave_floats(weight.to(FLOATS[old.kind]), kept)
        if old.kind == "int8":
            return quantize_int8(weight, kept)
        if self._quantize == "int4":
            return quantize_int4(weight, kept)
        raise Unsupported(
            f"the weight {name!r} is kept as {old.label}, the format of its file, and cannot be made from floats; "
            "load the model with dtype='float32', or from a folder of floats"
        )
