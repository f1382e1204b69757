"""A model's weights and description as the native step reads them: structs that point at the weights."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from headway.kernels.host.attention import Window
from headway.kernels.native import library
from headway.kernels.native.library import LayerStruct, MatrixStruct, ModelStruct, NormStruct
from headway.kernels.native.matmul import matrix_struct
from headway.models.description import GatedDelta, Mamba2, Recurrence, ShortConv
from headway.models.quantized.cpu import ALL_MATRICES, NORMS, VECTORS, QuantizedDecoder, QuantizedLayer

PLAIN_VECTORS = tuple(name for name in VECTORS if name.removesuffix("_bias") not in NORMS)


class BoundWeights:
    """The structs of a decoder, and the arrays made for them. It must live as long as they are used."""

    def __init__(self, decoder: QuantizedDecoder, windows: Sequence[Window]) -> None:
        self._decoder, c = decoder, decoder.config
        self._ropes, sets = c.rope_sets
        rows = np.broadcast_to(decoder.inv_freq, (c.layers, decoder.inv_freq.shape[-1]))
        self._inv_freq = np.ascontiguousarray(rows[[sets.index(i) for i in range(len(self._ropes))]])
        self._rope_halves = np.array([rope.dim // 2 for rope in self._ropes], np.int32)
        self._rope_scales = np.array([rope.scale for rope in self._ropes], np.float32)
        self._layers = (LayerStruct * c.layers)(
            *(self._layer(i, layer, windows.index(c.windows[i]), sets[i]) for i, layer in enumerate(decoder.layers))
        )

    def model(self) -> ModelStruct:
        """The whole model, without its KV cache."""
        d, c = self._decoder, self._decoder.config
        what, experts = c.description, c.description.experts
        shapes = [c.kv_shape(layer) for layer in range(c.layers)]
        struct = ModelStruct(
            layers=c.layers,
            hidden=c.hidden_size,
            inner=max(c.inner(layer) for layer in range(c.layers)),
            heads=c.heads,
            kv_heads=max(shape.heads for shape in shapes),
            head_dim=max(shape.dim for shape in shapes),
            vocab=c.vocab_size,
            rope_half=self._inv_freq.shape[-1],
            rope_sets=len(self._ropes),
            norm=library.NORMS.index("layer" if what.norm == "layer" else "rms"),
            activation=library.ACTIVATIONS.index(what.activation),
            qk_norm=library.QK_NORMS.index("head" if what.qk_norm == "unit" else what.qk_norm),
            parallel=int(what.parallel),
            eps=c.norm_eps,
            scale=c.attention_scale,
            attention_cap=what.attention_cap or 0.0,
            qkv_clip=what.qkv_clip or 0.0,
            residual_scale=what.residual_scale,
            embedding_scale=what.embedding_scale,
            logit_scale=what.logit_scale,
            logit_cap=what.logit_cap or 0.0,
            inv_freq=_at(self._inv_freq),
            rope_scales=_at(self._rope_scales),
            rope_halves=_at(self._rope_halves),
            positions=_at(d.positions),
            final_norm=_norm(d.final_norm, d.final_norm_bias),
            layer=self._layers,
            embedding=matrix_struct(d.embedding),
            output=matrix_struct(d.output),
        )
        if experts is not None:
            struct.experts, struct.per_token, struct.expert_inner = experts.count, experts.per_token, experts.size
            struct.shared_inner, struct.normalize = experts.shared_size, int(experts.normalize)
            struct.clamp, struct.alpha = experts.clamp or 0.0, experts.alpha
            struct.weighted_inputs = int(experts.sigmoid_inputs)
            if (groups := experts.groups) is not None:
                struct.route_groups, struct.route_kept, struct.route_best = groups.count, groups.kept, groups.best
                struct.route_sigmoid, struct.route_scale = int(groups.score == "sigmoid"), groups.scale
        if (latent := what.latent) is not None:
            struct.latent, struct.rotated, struct.query_latent = latent.size, latent.rotated, latent.query_size
            struct.key_dim, struct.value_dim = latent.key_dim, latent.value_dim
            struct.paired, struct.latent_eps = int(latent.paired), latent.eps
        if (temperature := what.temperature) is not None:
            struct.temperature_floor, struct.temperature_scale = temperature.floor, temperature.scale
        struct.gated_attention = int(what.gated_attention)
        _describe_recurrence(struct, what.recurrence)
        if what.per_layer is not None:
            self._describe_per_layer(struct)
        return struct

    def _describe_per_layer(self, struct: ModelStruct) -> None:
        d, e = self._decoder, self._decoder.config.hidden_size
        own, altup = d.config.description.per_layer, d.config.description.altup
        assert own is not None
        struct.norm_values, struct.hidden_root, struct.hidden_inverse = 1, e**-0.5, 1 / e
        for name, w in d.outer_matrices().items():
            setattr(struct, name, matrix_struct(w))
        struct.input_projection_norm = _at(d.input_projection_norm)
        if own.inputs is not None:
            struct.token_size, struct.token_root = own.inputs.size, own.inputs.size**0.5
        if altup is not None:
            struct.streams, struct.active = altup.streams, altup.active

    def _kv_before(self, layer: int) -> int:
        """Numbers of a slot in the KV cache before the keys that a layer attends to."""
        c = self._decoder.config
        if layer not in c.attention_layers:
            return 0
        place, parts = c.kv_places[c.attention_layers.index(layer)], 1 if c.description.latent else 2
        return parts * sum(shape.heads * shape.dim for shape in map(c.kv_shape, c.kv_layers[:place]))

    def _layer(self, i: int, layer: QuantizedLayer, mask_set: int, rope_set: int) -> LayerStruct:
        c, what = self._decoder.config, self._decoder.config.description
        shape, sparsity = c.kv_shape(i), 0.0 if what.altup is None else what.altup.sparsity[i]
        vectors = {name: _at(getattr(layer, name)) for name in PLAIN_VECTORS}
        if what.altup is not None and not what.altup.scaled:
            vectors["altup_scale"] = None
        matrices: dict[str, MatrixStruct] = {
            name: matrix_struct(w) for name in ALL_MATRICES if (w := getattr(layer, name)) is not None
        }
        norm_in = _norm(layer.input_norm, layer.input_norm_bias)
        return LayerStruct(
            **matrices,
            norm_in=norm_in,
            norm_mlp=norm_in if what.one_norm else _norm(layer.mlp_norm, layer.mlp_norm_bias),
            post_attention=_norm(layer.post_attention_norm, layer.post_attention_norm_bias),
            post_mlp=_norm(layer.post_mlp_norm, layer.post_mlp_norm_bias),
            **vectors,
            mask_set=mask_set,
            rope_set=rope_set,
            kv_heads=shape.heads,
            head_dim=shape.dim,
            kv_before=self._kv_before(i),
            state_layer=c.recurrent_layers.index(i) if i in c.recurrent_layers else -1,
            sparse=int(sparsity > 0),
            cut=NormalDist().inv_cdf(sparsity) if sparsity > 0 else 0.0,
        )


def _describe_recurrence(struct: ModelStruct, what: Recurrence | None) -> None:
    if what is None:
        return
    struct.taps = what.taps
    match what:
        case ShortConv():
            struct.recurrence = library.RECURRENCES.index("short conv")
        case GatedDelta():
            struct.recurrence = library.RECURRENCES.index("gated delta")
            struct.mix_heads, struct.mix_groups = what.value_heads, what.key_heads
            struct.mix_key_dim, struct.mix_value_dim, struct.cycled = what.key_dim, what.value_dim, int(what.cycled)
        case Mamba2():
            struct.recurrence = library.RECURRENCES.index("mamba-2")
            struct.mix_heads, struct.mix_groups = what.heads, what.groups
            struct.mix_key_dim, struct.mix_value_dim = what.state_size, what.head_dim
            struct.gate_first, (struct.step_least, struct.step_most) = int(what.gate_first), what.steps


def _norm(weight: np.ndarray | None, bias: np.ndarray | None) -> NormStruct:
    return NormStruct(_at(weight), _at(bias))


def _at(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data
