"""Small configs for `random_model`, one for each group of differences that layers have: no transformers is needed."""

from __future__ import annotations

from typing import Any

from headway.kernels.host.attention import ChunkWindow
from headway.kernels.host.rope import Rope
from headway.models.description import (
    AltUp,
    Description,
    ExpertGroups,
    Experts,
    KvShape,
    LatentAttention,
    LayerInputs,
    PerLayer,
    Temperature,
)

SMALL = {"hidden_size": 32, "intermediate_size": 36, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2}
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def _config(description: Description, **more: Any) -> dict[str, Any]:
    return SMALL | more | {"description": description}


DENSE: dict[str, dict[str, Any]] = {
    "norms on both sides, caps and scales, as Gemma 2": _config(
        Description(
            norm="rms+1",
            norm_place="both",
            activation="gelu_tanh",
            attention_cap=3.0,
            attention_scale=0.2,
            embedding_scale=32**0.5,
            logit_cap=4.0,
        ),
        windows=(6, None),
        tied=True,
    ),
    "several ropes and norms of heads, as Gemma 3": _config(
        Description(norm="rms+1", norm_place="both", activation="gelu_tanh", ropes=(Rope(16, 100.0), Rope(16))),
        qk_norm=True,
        windows=(5, None),
    ),
    "learned positions and biases, as GPT-2": _config(
        Description(
            norm="layer",
            norm_bias=True,
            activation="gelu",
            gated=False,
            learned_positions=True,
            ropes=(Rope(0), Rope(0)),
            head_bias=True,
        ),
        **BIASES,
        kv_heads=4,
        max_positions=128,
    ),
    "parallel with two norms and partial rotation, as NeoX": _config(
        Description(norm="layer", norm_bias=True, parallel=True, activation="gelu", gated=False),
        **BIASES,
        rope=Rope(8),
    ),
    "parallel with one norm, layers without a rope, as Cohere 2": _config(
        Description(norm="layer", parallel=True, one_norm=True, ropes=(Rope(16), Rope(0)), logit_scale=0.3),
        windows=(4, None),
    ),
    "norms after, of whole rows of queries, clipped, as OLMo 2": _config(
        Description(norm_place="after", qk_norm="row", qkv_clip=1.5), qk_norm=True
    ),
    "norms of each head, a scaled residual, as StableLM and Granite": _config(
        Description(norm="layer", qk_norm="each", residual_scale=0.4, norm_bias=True), qk_norm=True, head_dim=24
    ),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts with a shared one and a dense layer, as Qwen2-MoE": _config(
        Description(
            experts=Experts(5, 2, 20, normalize=False, shared_size=12, dense_layers=frozenset({1})),
        ),
        qkv_bias=True,
    ),
    "clamped experts with biases, sinks, as GPT-OSS": _config(
        Description(
            sinks=True,
            experts=Experts(4, 2, 20, router_bias=True, bias=True, clamp=2.0, alpha=1.7),
        ),
        qkv_bias=True,
        o_bias=True,
        windows=(5, None),
    ),
    "experts with weighted inputs, chunks, growing queries, as Llama 4": _config(
        Description(
            qk_norm="unit",
            ropes=(Rope(16), Rope(0)),
            temperature=Temperature(5.0, 0.4),
            experts=Experts(5, 1, 20, shared_size=20, shared_gated=False, sigmoid_inputs=True),
        ),
        qk_norm=True,
        windows=(ChunkWindow(6), None),
    ),
}
LATENT: dict[str, dict[str, Any]] = {
    "latent attention, experts by groups with a correction, a dense layer, as DeepSeek V3": _config(
        Description(
            latent=LatentAttention(20, 8, 12, 10, query_size=24),
            attention_scale=0.25,
            experts=Experts(
                *(8, 3, 20),
                shared_size=12,
                shared_gated=False,
                groups=ExpertGroups("sigmoid", 4, 2, 2, True, 2.5),
                dense_layers=frozenset({0}),
            ),
        ),
        kv_heads=1,
        head_dim=28,
        rope=Rope(8),
    ),
    "latent attention without latent queries, experts by softmax, as DeepSeek V2 Lite": _config(
        Description(
            latent=LatentAttention(20, 8, 12, 10, paired=False),
            attention_scale=0.25,
            experts=Experts(
                5, 2, 20, normalize=False, shared_size=20, shared_gated=False, groups=ExpertGroups("softmax")
            ),
        ),
        heads=3,
        kv_heads=1,
        head_dim=28,
        rope=Rope(8),
        qkv_bias=True,
    ),
}
BOTH = {"norm_place": "both", "activation": "gelu_tanh", "attention_scale": 1.0, "embedding_scale": 32**0.5}
PER_LAYER: dict[str, dict[str, Any]] = {
    "heads and widths of layers, earlier keys and values, inputs of tokens, as Gemma 4": _config(
        Description(
            **BOTH,
            ropes=(Rope(16, 100.0), Rope(24, 5000.0), Rope(16, 100.0)),
            per_layer=PerLayer(
                kv_from=(0, 1, 0),
                kv_shapes=(KvShape(2, 16), KvShape(1, 24), KvShape(2, 16)),
                inners=(36, 36, 52),
                inputs=LayerInputs(8, 97),
                scaled=True,
            ),
        ),
        windows=(5, None, 5),
        layers=3,
        head_dim=24,
        qk_norm=True,
        tied=True,
    ),
    "experts beside the feed-forward, keys as values, as Gemma 4": _config(
        Description(
            **BOTH,
            ropes=(Rope(16, 100.0), Rope(32, 5000.0)),
            experts=Experts(5, 2, 20, beside_dense=True),
            per_layer=PerLayer(
                kv_from=(0, 1),
                kv_shapes=(KvShape(2, 16), KvShape(1, 32)),
                inners=(36, 36),
                keys_as_values=frozenset({1}),
                scaled=True,
            ),
        ),
        windows=(5, None),
        head_dim=32,
        qk_norm=True,
    ),
}
STREAMS: dict[str, dict[str, Any]] = {
    "residuals side by side, sparse gates, a low-rank product, as Gemma 3n": _config(
        Description(
            **BOTH,
            ropes=(Rope(16, 100.0),) * 2,
            logit_cap=6.0,
            per_layer=PerLayer(
                kv_from=(0, 0), kv_shapes=(KvShape(2, 16),) * 2, inners=(36, 20), inputs=LayerInputs(8, 90)
            ),
            altup=AltUp(streams=3, active=1, rank=6, sparsity=(0.9, 0.0)),
        ),
        qk_norm=True,
        tied=True,
    ),
}
ALL = DENSE | EXPERTS | LATENT | PER_LAYER | STREAMS
