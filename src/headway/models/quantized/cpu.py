"""The decoder with quantized weights for the CPU's native step: the same model as `Decoder`, matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.system.device import CPU, Device
from headway.kernels.host.quantized import LANES, QuantizedMatrix
from headway.models.any_decoder import AnyDecoder
from headway.models.config import ModelConfig
from headway.models.weights.shapes import Shapes, layer_shapes, model_shapes

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
EXPERT_MATRICES = ("router", "expert_gate", "expert_up", "expert_down")
SHARED_MATRICES = ("shared_gate", "shared_up", "shared_down", "shared_router")
LATENT_MATRICES = ("q_down", "q_up", "kv_down", "key_up", "value_up")
MIXER_MATRICES = ("attention_gate", "mix_in", "mix_qkv", "mix_beta", "mix_step", "mix_gate", "mix_out")
STREAM_MATRICES = ("laurel_down", "laurel_up", "altup_router", "altup_predict", "altup_correct")
INPUT_MATRICES = ("input_gate", "input_out")
ALL_MATRICES = MATRICES + EXPERT_MATRICES + SHARED_MATRICES + LATENT_MATRICES + MIXER_MATRICES
ALL_MATRICES += STREAM_MATRICES + INPUT_MATRICES
NORMS = ("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm")
VECTORS = (*NORMS, *(f"{norm}_bias" for norm in NORMS), "q_norm", "k_norm", "sinks")
VECTORS += ("q_down_norm", "kv_down_norm", "router_correction")
MIXER_VECTORS = ("conv", "conv_bias", "step_bias", "rate", "skip", "mix_norm")
VECTORS += MIXER_VECTORS
VECTORS += ("post_input_norm", "layer_scale", "laurel_norm", "altup_norm", "altup_scale")
VECTORS += ("dense_norm", "expert_in_norm", "expert_out_norm", "router_scale", "expert_scale")
OUTER_VECTORS = ("final_norm_bias", "positions", "input_projection_norm")
OUTER_MATRICES = ("token_inputs", "input_projection", "altup_spread", "altup_gather")
PHASES = {"o": "output projection", "mix_out": "output projection"}
PHASES |= dict.fromkeys(("q", "k", "v", "q_norm", "k_norm", "q_down_norm", "kv_down_norm"), "qkv")
PHASES |= dict.fromkeys((*LATENT_MATRICES, *MIXER_MATRICES[:-1], *MIXER_VECTORS), "qkv")


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """The weights of one layer by role, None for what it does not have (see `models.shapes`).

    Norms are in float32; their weights never count from 1, whatever the file has. A matrix of experts has the rows of
    one after the other, each expert's padded to whole blocks of 16; those of heads lie the same way.
    """

    q: QuantizedMatrix | None = None
    k: QuantizedMatrix | None = None
    v: QuantizedMatrix | None = None
    o: QuantizedMatrix | None = None
    gate: QuantizedMatrix | None = None
    up: QuantizedMatrix | None = None
    down: QuantizedMatrix | None = None
    router: QuantizedMatrix | None = None
    expert_gate: QuantizedMatrix | None = None
    expert_up: QuantizedMatrix | None = None
    expert_down: QuantizedMatrix | None = None
    shared_gate: QuantizedMatrix | None = None
    shared_up: QuantizedMatrix | None = None
    shared_down: QuantizedMatrix | None = None
    shared_router: QuantizedMatrix | None = None
    q_down: QuantizedMatrix | None = None
    q_up: QuantizedMatrix | None = None
    kv_down: QuantizedMatrix | None = None
    key_up: QuantizedMatrix | None = None
    value_up: QuantizedMatrix | None = None
    attention_gate: QuantizedMatrix | None = None
    mix_in: QuantizedMatrix | None = None
    mix_qkv: QuantizedMatrix | None = None
    mix_beta: QuantizedMatrix | None = None
    mix_step: QuantizedMatrix | None = None
    mix_gate: QuantizedMatrix | None = None
    mix_out: QuantizedMatrix | None = None
    input_gate: QuantizedMatrix | None = None
    input_out: QuantizedMatrix | None = None
    laurel_down: QuantizedMatrix | None = None
    laurel_up: QuantizedMatrix | None = None
    altup_router: QuantizedMatrix | None = None
    altup_predict: QuantizedMatrix | None = None
    altup_correct: QuantizedMatrix | None = None
    input_norm: np.ndarray | None = None
    mlp_norm: np.ndarray | None = None
    post_attention_norm: np.ndarray | None = None
    post_mlp_norm: np.ndarray | None = None
    input_norm_bias: np.ndarray | None = None
    mlp_norm_bias: np.ndarray | None = None
    post_attention_norm_bias: np.ndarray | None = None
    post_mlp_norm_bias: np.ndarray | None = None
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    sinks: np.ndarray | None = None  # [H]
    q_down_norm: np.ndarray | None = None
    kv_down_norm: np.ndarray | None = None
    router_correction: np.ndarray | None = None  # [X]
    conv: np.ndarray | None = None  # [channels, taps]
    conv_bias: np.ndarray | None = None
    step_bias: np.ndarray | None = None
    rate: np.ndarray | None = None
    skip: np.ndarray | None = None
    mix_norm: np.ndarray | None = None
    post_input_norm: np.ndarray | None = None
    layer_scale: np.ndarray | None = None  # [1]
    laurel_norm: np.ndarray | None = None
    altup_norm: np.ndarray | None = None
    altup_scale: np.ndarray | None = None
    dense_norm: np.ndarray | None = None
    expert_in_norm: np.ndarray | None = None
    expert_out_norm: np.ndarray | None = None
    router_scale: np.ndarray | None = None
    expert_scale: np.ndarray | None = None  # [X]

    def matrices(self) -> list[QuantizedMatrix]:
        return [w for name in ALL_MATRICES if (w := getattr(self, name)) is not None]

    def vectors(self) -> list[np.ndarray]:
        return [v for name in VECTORS if (v := getattr(self, name)) is not None]

    def nbytes(self) -> dict[str, int]:
        """Bytes of its weights, by phase."""
        size = {"norm": 0, "qkv": 0, "output projection": 0, "feed-forward": 0}
        for name in ALL_MATRICES + VECTORS:
            if (weight := getattr(self, name)) is not None:
                size[PHASES.get(name, "norm" if name in VECTORS else "feed-forward")] += weight.nbytes
        return size

    def check(self, at: str, c: ModelConfig, layer: int) -> None:
        """Raise for a weight that does not fit the config; `at` goes before its name."""
        shapes = layer_shapes(c, layer)
        own = c.description.per_layer
        if own is None and (self.q_norm is None) != (self.k_norm is None):
            raise InvalidInput(f"the layer {at[:-1]!r} has a norm for one of q and k; both or none are needed")
        if own is None and self.q_norm is not None:  # a layer may have norms that its config does not speak of
            shapes = {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,), **shapes}
        for name in ALL_MATRICES + VECTORS:
            weight, shape = getattr(self, name), shapes.get(name)
            if (weight is None) != (shape is None):
                what = "is missing" if weight is None else "is not one that this config has"
                raise InvalidInput(f"the weight {at + name!r} {what}")
            if weight is None or shape is None:
                continue
            if isinstance(weight, QuantizedMatrix):
                _check_matrix(at + name, weight, interleaved_shape(shape))
            else:
                _check_floats(at + name, weight, *shape)


def interleaved_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and inputs of a matrix in the interleaved layout: those of experts are padded to whole blocks."""
    *experts, n, k = shape
    return (prod(experts) * (-(-n // LANES) * LANES) if experts else n), k


@dataclass(frozen=True, eq=False)
class QuantizedDecoder(AnyDecoder):
    """Quantized or float weights; activations and the KV cache are float32, on the CPU."""

    config: ModelConfig
    embedding: QuantizedMatrix  # [V, E]
    layers: tuple[QuantizedLayer, ...]
    final_norm: np.ndarray
    output: QuantizedMatrix  # [V, E]; the embedding itself when tied
    inv_freq: np.ndarray  # [rope dim / 2], or with a row for each layer where its description has ropes
    final_norm_bias: np.ndarray | None = None
    positions: np.ndarray | None = None  # [max positions, E]
    token_inputs: QuantizedMatrix | None = None  # [V', L P], of all layers that there were
    input_projection: QuantizedMatrix | None = None  # [L P, E]
    input_projection_norm: np.ndarray | None = None  # [P]
    altup_spread: QuantizedMatrix | None = None  # [n - 1, E, E], as experts lie
    altup_gather: QuantizedMatrix | None = None

    @property
    def device(self) -> Device:
        return CPU

    @property
    def dtype(self) -> np.dtype:
        """Of activations, keys and values."""
        return np.dtype(np.float32)

    def nbytes(self) -> Mapping[str, int]:
        """Weight bytes that one forward reads, by phase."""
        bias = 0 if self.final_norm_bias is None else self.final_norm_bias.nbytes
        size = {"norm": self.final_norm.nbytes + bias, "qkv": 0, "output projection": 0, "feed-forward": 0}
        for layer in self.layers:
            parts = layer.nbytes()
            size = {phase: size[phase] + parts[phase] for phase in size}
        size["feed-forward"] += _bytes(self.input_projection, self.input_projection_norm)
        embed = _bytes(self.positions, self.token_inputs, self.altup_spread)
        return {**size, "head": self.output.nbytes + _bytes(self.altup_gather), "embed": embed}

    def outer_matrices(self) -> dict[str, QuantizedMatrix]:
        """The matrices outside of layers besides embedding and output, by role."""
        return {name: w for name in OUTER_MATRICES if (w := getattr(self, name)) is not None}

    def outer_vectors(self) -> dict[str, np.ndarray]:
        """The vectors outside of layers besides the final norm, by role."""
        return {name: v for name in OUTER_VECTORS if (v := getattr(self, name)) is not None}

    def first_layers(self, count: int) -> QuantizedDecoder:
        """The first layers of the model, with its embedding and head."""
        few, projection = self.config.first_layers(count), self.input_projection
        inv_freq = self.inv_freq if self.inv_freq.ndim == 1 else self.inv_freq[:count]
        if projection is not None:  # a part of it is each layer's
            projection = projection.expert(0, projection.n // len(self.layers) * count)
        return replace(self, config=few, layers=self.layers[:count], inv_freq=inv_freq, input_projection=projection)

    @property
    def row_quantization(self) -> str | None:
        """How its layers quantize activations before a matmul, or None if all of them take floats."""
        kinds = {w.row_quantization for layer in self.layers for w in layer.matrices()} - {None}
        return " and ".join(sorted(map(str, kinds))) or None

    @property
    def is_quantized(self) -> bool:
        """Whether a matrix takes quantized activations: then every sum has the order that its format fixes."""
        return self.row_quantization is not None or self.output.row_quantization is not None

    def check(self) -> None:
        """Raise, naming the weight, unless each matches the config and is laid out as native code reads it."""
        c, e = self.config, self.config.hidden_size
        if len(self.layers) != c.layers or len(c.windows) != c.layers:
            raise InvalidInput(
                f"the decoder has {len(self.layers)} layers and {len(c.windows)} windows; its config says {c.layers}"
            )
        _check_matrix("embedding", self.embedding, (c.vocab_size, e))
        _check_matrix("output", self.output, (c.vocab_size, e))
        _check_floats("final_norm", self.final_norm, e)
        if self.final_norm_bias is not None:
            _check_floats("final_norm_bias", self.final_norm_bias, e)
        if self.positions is not None:
            _check_floats("positions", self.positions, c.max_positions, e)
        self._check_outer(model_shapes(c))
        ropes = c.description.ropes
        widest = max(rope.dim for rope in (c.rope, *(ropes or ())))
        _check_floats("inv_freq", self.inv_freq, *(() if ropes is None else (c.layers,)), widest // 2)
        for i, layer in enumerate(self.layers):
            layer.check(f"layers.{i}.", c, i)

    def _check_outer(self, shapes: Shapes) -> None:
        """Check what is outside of layers; the first layers of a model have the inputs of all."""
        held: dict[str, Any] = {**self.outer_matrices(), **self.outer_vectors()}
        for name in (*OUTER_MATRICES, "input_projection_norm"):
            weight, shape = held.get(name), shapes.get(name)
            if (weight is None) != (shape is None):
                what = "is missing" if weight is None else "is not one that this config has"
                raise InvalidInput(f"the weight {name!r} {what}")
            if weight is None or shape is None:
                continue
            if len(shape) == 1:
                _check_floats(name, weight, *shape)
                continue
            n, k = interleaved_shape(shape)
            _check_matrix(name, weight, (n, max(k, weight.k)) if name == "token_inputs" else (n, k))

    def formats(self) -> tuple[str, ...]:
        """The weight formats in use, most bytes first."""
        size: dict[str, int] = {}
        outer = (self.output, *self.outer_matrices().values())
        for w in (*outer, *(w for layer in self.layers for w in layer.matrices())):
            size[w.label] = size.get(w.label, 0) + w.nbytes
        return tuple(sorted(size, key=lambda label: -size[label]))

    def arrays(self) -> list[np.ndarray]:
        """Every array, in a fixed order."""
        arrays = [self.final_norm, self.inv_freq, *self.outer_vectors().values()]
        for layer in self.layers:
            arrays += layer.vectors()
        outer = (self.embedding, self.output, *self.outer_matrices().values())
        for w in (*outer, *(w for layer in self.layers for w in layer.matrices())):
            arrays += w.arrays()
        return arrays


def _bytes(*weights: QuantizedMatrix | np.ndarray | None) -> int:
    return sum(w.nbytes for w in weights if w is not None)


# -- checks before native code reads the weights ---------------------------------------------------------------------


def _check_matrix(name: str, w: QuantizedMatrix, shape: tuple[int, int]) -> None:
    if (w.n, w.k) != shape:
        raise InvalidInput(f"the weight {name!r} has shape {[w.n, w.k]}; this config needs {list(shape)}")
    if problem := w.problem():
        raise InvalidInput(f"the weight {name!r} cannot be used: {problem}")


def _check_floats(name: str, norm: np.ndarray, *shape: int) -> None:
    if not isinstance(norm, np.ndarray) or norm.shape != shape or norm.dtype != np.float32:
        raise InvalidInput(
            f"the weight {name!r} has shape {list(norm.shape)} in {norm.dtype}; "
            f"an array {list(shape)} in float32 is needed"
        )
    if not norm.flags.c_contiguous:
        raise InvalidInput(f"the weight {name!r} must be contiguous")
