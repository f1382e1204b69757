"""A decoder of torch for the CPU's native step: its float weights in the interleaved layout, values unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from headway.base.arrays import aligned, from_tensor, widen
from headway.base.errors import InvalidInput
from headway.kernels.host.quantized import QuantizedMatrix, interleave_floats, padded_experts
from headway.models.decoder import Decoder
from headway.models.described import DescribedDecoder, DescribedLayer
from headway.models.experts import ExpertWeights
from headway.models.layers import DecoderLayer, Linear
from headway.models.quantized.cpu import (
    INPUT_MATRICES,
    OUTER_MATRICES,
    STREAM_MATRICES,
    VECTORS,
    QuantizedDecoder,
    QuantizedLayer,
)
from headway.models.recurrent import GatedDeltaMixer
from headway.models.weights.shapes import layer_shapes


def interleave_decoder(decoder: Decoder) -> QuantizedDecoder:
    """The decoder as the native step reads it."""
    c = decoder.config
    outer: dict[str, Any] = {}
    embedding = interleave_floats(from_tensor(decoder.embedding))
    output, bias, inv_freq = embedding, None, decoder.inv_freq
    if isinstance(decoder, DescribedDecoder):
        outer = {n: _floats(t) for n in ("final_norm_bias", "positions") if (t := getattr(decoder, n)) is not None}
        bias = None if decoder.output_bias is None else from_tensor(decoder.output_bias)
        inv_freq = decoder.inv_freq if c.description.ropes is not None else decoder.inv_freq[0]
        outer |= _outer(decoder)
    if decoder.output is not decoder.embedding or bias is not None:
        output = interleave_floats(from_tensor(decoder.output), bias)
    return QuantizedDecoder(
        config=c,
        embedding=embedding,
        layers=tuple(_layer(decoder, layer, i) for i, layer in enumerate(decoder.layers)),
        final_norm=_floats(decoder.final_norm, _offset(decoder)),
        output=output,
        inv_freq=_floats(inv_freq),
        **outer,
    )


def _layer(decoder: Decoder, layer: DecoderLayer, i: int) -> QuantizedLayer:
    at = f"layers.{i}."
    parts: dict[str, Any] = {}
    experts = layer.experts if isinstance(layer, DescribedLayer) else None
    stacks: list[tuple[tuple[str, ...], Linear, list[int]]] = []
    if latent := decoder.config.description.latent:
        parts |= _latent(layer, "q_down" if latent.query_size else "q")
    elif layer.qkv.nbytes:
        heads = {"q": layer.heads, "k": layer.kv_heads, "v": layer.kv_heads}
        made = tuple(role for role in heads if role in layer_shapes(decoder.config, i))
        stacks.append((made, layer.qkv, [heads[role] * layer.head_dim for role in made]))
    if layer.out.nbytes:
        stacks.append((("o",), layer.out, [len(layer.out.weight)]))
    parts |= _mixer(layer)
    if experts is None and layer.down.nbytes:
        inner, gated = layer.down.weight.shape[1], decoder.config.description.gated
        stacks.append((("gate", "up"), layer.gate_up, [inner, inner]) if gated else (("up",), layer.gate_up, [inner]))
        stacks.append((("down",), layer.down, [len(layer.down.weight)]))
    elif experts is not None:
        parts |= _experts(experts, layer.gate_up, layer.down)
    if (beside := getattr(layer, "beside", None)) is not None:
        parts |= _experts(beside.experts, beside.gate_up, beside.down)
    roles = [role for role in (*INPUT_MATRICES, *STREAM_MATRICES) if role in layer_shapes(decoder.config, i)]
    parts |= {role: _matrix(getattr(layer, role)) for role in roles}
    for names, linear, rows in stacks:
        parts |= _stack(at, names, linear, rows)
    return QuantizedLayer(**parts, **_vectors(decoder, layer, i))


def _vectors(decoder: Decoder, layer: DecoderLayer, i: int) -> dict[str, Any]:
    """The norms and sinks that the layer uses."""
    shapes, vectors = layer_shapes(decoder.config, i), {}
    beside = getattr(layer, "beside", None)
    owners = (layer, getattr(layer, "experts", None), getattr(layer, "mixer", None), beside)
    owners = (*owners, getattr(beside, "experts", None))
    for name in VECTORS:
        key = "correction" if name == "router_correction" else name
        value = next((v for owner in owners if (v := getattr(owner, key, None)) is not None), None)
        if value is not None and (name in shapes or name in ("q_norm", "k_norm")):
            vectors[name] = _floats(value, _offset(decoder) if name.endswith("_norm") and name != "mix_norm" else 0.0)
    return vectors


def _latent(layer: Any, queries: str) -> dict[str, QuantizedMatrix]:
    """The matrices of latent attention; `queries` is what its qkv makes."""
    matrices = {queries: _matrix(layer.qkv), "kv_down": _matrix(layer.kv_down)}
    matrices |= {} if layer.q_up is None else {"q_up": _matrix(layer.q_up)}
    return matrices | {name: _stacked_experts(Linear(getattr(layer, name))) for name in ("key_up", "value_up")}


def _mixer(layer: Any) -> dict[str, QuantizedMatrix]:
    """The matrices of a recurrence, and the gate of attention."""
    gate, mixer = getattr(layer, "attention_gate", None), getattr(layer, "mixer", None)
    matrices = {} if gate is None else {"attention_gate": _matrix(gate)}
    if mixer is None:
        return matrices
    if isinstance(mixer, GatedDeltaMixer):
        rows = [mixer.what.channels, mixer.what.value_heads, mixer.what.value_heads]
        matrices |= _stack("", ("mix_qkv", "mix_beta", "mix_step"), mixer.mix_in, rows)
        matrices["mix_gate"] = _matrix(mixer.mix_gate)
    else:
        matrices["mix_in"] = _matrix(mixer.mix_in)
    return {**matrices, "mix_out": _matrix(mixer.mix_out)}


def _outer(decoder: DescribedDecoder) -> dict[str, Any]:
    """What layers that differ from each other have outside of them."""
    held = {role: w for role in OUTER_MATRICES if (w := getattr(decoder, role, None)) is not None}
    made: dict[str, Any] = {
        role: _stacked_experts(Linear(w)) if w.ndim == 3 else interleave_floats(from_tensor(w))
        for role, w in held.items()
    }
    norm = getattr(decoder, "input_projection_norm", None)
    return made if norm is None else made | {"input_projection_norm": _floats(norm)}


def _experts(experts: ExpertWeights, gate_up: Linear, down: Linear) -> dict[str, QuantizedMatrix]:
    size = down.weight.shape[-1]
    gate, up = (
        Linear(gate_up.weight[:, rows], None if gate_up.bias is None else gate_up.bias[:, rows])
        for rows in (slice(None, size), slice(size, None))
    )
    parts = {"expert_gate": gate, "expert_up": up, "expert_down": down}
    matrices = {name: _stacked_experts(part) for name, part in parts.items()}
    matrices["router"] = _matrix(experts.router)
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        shared = experts.shared_down.weight.shape[1]
        matrices |= _stack("", ("shared_gate", "shared_up"), experts.shared_gate_up, [shared, shared])
        matrices["shared_down"] = _matrix(experts.shared_down)
    if experts.shared_router is not None:
        matrices["shared_router"] = _matrix(experts.shared_router)
    return matrices


def _stacked_experts(linear: Linear) -> QuantizedMatrix:
    bias = None if linear.bias is None else padded_experts(from_tensor(linear.bias))
    return interleave_floats(padded_experts(from_tensor(linear.weight)), bias)


def _stack(at: str, names: tuple[str, ...], linear: Linear, rows: list[int]) -> dict[str, QuantizedMatrix]:
    """Matrices that are stacked in one."""
    sizes = [len(linear.weight)] + ([] if linear.bias is None else [len(linear.bias)])
    if linear.weight.ndim != 2 or any(size != sum(rows) for size in sizes):
        has = [list(t.shape) for t in (linear.weight, linear.bias) if t is not None]
        raise InvalidInput(
            f"the weight {at + '+'.join(names)!r} has shape {' and a bias of '.join(map(str, has))}; "
            f"{sum(rows)} rows are needed"
        )
    biases = [None] * len(rows) if linear.bias is None else linear.bias.split(rows)
    parts = zip(linear.weight.split(rows), biases, strict=True)
    return {name: _matrix(Linear(weight, bias)) for name, (weight, bias) in zip(names, parts, strict=True)}


def _matrix(linear: Any) -> QuantizedMatrix:
    return interleave_floats(from_tensor(linear.weight), None if linear.bias is None else from_tensor(linear.bias))


def _offset(decoder: Decoder) -> float:
    return 1.0 if decoder.config.description.norm == "rms+1" else 0.0


def _floats(norm: Tensor, offset: float = 0.0) -> np.ndarray:
    wide = widen(from_tensor(norm))
    return aligned(wide + np.float32(offset) if offset else wide)
