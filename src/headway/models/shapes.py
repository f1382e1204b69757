"""The weights of a model by role, with their shapes: what its config and description say there must be.

Roles are the words of `DecoderLayer`: `q` is the matrix, `q_bias` its bias. A matrix of experts has a leading dimension
for them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def model_shapes(c: ModelConfig) -> Shapes:
    """The weights outside of layers; a tied output is the embedding."""
    d, e = c.description, c.hidden_size
    shapes: Shapes = {"embedding": (c.vocab_size, e)}
    if d.learned_positions:
        shapes["positions"] = (c.max_positions, e)
    shapes |= _norm("final_norm", e, d.norm_bias)
    if not c.tied:
        shapes["output"] = (c.vocab_size, e)
    if d.head_bias:
        shapes["output_bias"] = (c.vocab_size,)
    return shapes


def layer_shapes(c: ModelConfig, layer: int) -> Shapes:
    """The weights of one layer."""
    d, e = c.description, c.hidden_size
    shapes: Shapes = {}
    for norm in _norms(c):
        shapes |= _norm(norm, e, d.norm_bias)
    return shapes | _attention(c) | _feed_forward(c, layer)


def has_experts(c: ModelConfig, layer: int) -> bool:
    experts = c.description.experts
    return experts is not None and layer not in experts.dense_layers


def parameters(c: ModelConfig, *, active: bool = False) -> int:
    """The number of parameters, or of those that one token uses: not all experts, and one row of the embedding."""
    total = sum(map(prod, model_shapes(c).values()))
    if active and not c.tied:
        total -= (c.vocab_size - 1) * c.hidden_size
    for layer in range(c.layers):
        for role, shape in layer_shapes(c, layer).items():
            experts = c.description.experts
            per = experts.per_token / experts.count if active and experts and role.startswith("expert_") else 1
            total += round(prod(shape) * per)
    return total


def _norms(c: ModelConfig) -> list[str]:
    d = c.description
    before = ["input_norm"] if d.one_norm else ["input_norm", "mlp_norm"]
    after = ["post_attention_norm", "post_mlp_norm"]
    return {"before": before, "after": after, "both": before + after}[d.norm_place]


def _norm(role: str, size: int, bias: bool) -> Shapes:
    return {role: (size,), f"{role}_bias": (size,)} if bias else {role: (size,)}


def _attention(c: ModelConfig) -> Shapes:
    e, d, q, kv = c.hidden_size, c.head_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = _matrices({"q": (q, e), "k": (kv, e), "v": (kv, e)}, c.qkv_bias) | _matrices({"o": (e, q)}, c.o_bias)
    if c.qk_norm:
        sizes = {"head": ((d,), (d,)), "row": ((q,), (kv,)), "each": ((c.heads, d), (c.kv_heads, d))}
        shapes["q_norm"], shapes["k_norm"] = sizes[c.description.qk_norm]
    if c.description.sinks:
        shapes["sinks"] = (c.heads,)
    return shapes


def _feed_forward(c: ModelConfig, layer: int) -> Shapes:
    e, f, d = c.hidden_size, c.intermediate_size, c.description
    if not has_experts(c, layer):
        parts = {"gate": (f, e)} if d.gated else {}
        return _matrices({**parts, "up": (f, e), "down": (e, f)}, c.mlp_bias)
    x = d.experts
    assert x is not None
    shapes = _matrices({"router": (x.count, e)}, x.router_bias)
    experts = {"expert_gate": (x.size, e), "expert_up": (x.size, e), "expert_down": (e, x.size)}
    for role, shape in experts.items():
        shapes[role] = (x.count, *shape)
        if x.bias:
            shapes[f"{role}_bias"] = (x.count, shape[0])
    if x.shared_size:
        s = x.shared_size
        shapes |= {"shared_gate": (s, e), "shared_up": (s, e), "shared_down": (e, s), "shared_router": (1, e)}
    return shapes


def _matrices(shapes: dict[str, tuple[int, int]], bias: bool) -> Shapes:
    biases = {f"{role}_bias": shape[:1] for role, shape in shapes.items()} if bias else {}
    return {**shapes, **biases}
