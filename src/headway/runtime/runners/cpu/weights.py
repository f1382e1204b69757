"""A model's weights and description as the native step reads them: structs that point at the weights."""

from __future__ import annotations

from collections.abc import Sequence

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
        rows = np.broadcast_to(decoder.inv_freq, (c.layers, c.rope.dim // 2))
        self._inv_freq = np.ascontiguousarray(rows[[sets.index(i) for i in range(len(self._ropes))]])
        self._rope_scales = np.array([rope.scale for rope in self._ropes], np.float32)
        self._layers = (LayerStruct * c.layers)(
            *(
                self._layer(layer, windows.index(c.windows[i]), sets[i], self._places(i))
                for i, layer in enumerate(decoder.layers)
            )
        )

    def model(self) -> ModelStruct:
        """The whole model, without its KV cache."""
        d, c = self._decoder, self._decoder.config
        what, experts = c.description, c.description.experts
        struct = ModelStruct(
            layers=c.layers,
            hidden=c.hidden_size,
            inner=c.intermediate_size,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            vocab=c.vocab_size,
            rope_half=c.rope.dim // 2,
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
        return struct

    def _places(self, layer: int) -> tuple[int, int]:
        """Where a layer's keys and values are in the KV cache, and its recurrent state in a place."""
        c = self._decoder.config
        if layer in c.recurrent_layers:
            return 0, c.recurrent_layers.index(layer)
        return c.attention_layers.index(layer), -1

    def _layer(self, layer: QuantizedLayer, mask_set: int, rope_set: int, places: tuple[int, int]) -> LayerStruct:
        what = self._decoder.config.description
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
            **{name: _at(getattr(layer, name)) for name in PLAIN_VECTORS},
            mask_set=mask_set,
            rope_set=rope_set,
            kv_layer=places[0],
            state_layer=places[1],
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
