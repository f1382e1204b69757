"""The weights of a model by role, with their shapes: what its config and description say there must be.

Roles are the words of `DecoderLayer`: `q` is the matrix, `q_bias` its bias. A matrix of experts has a leading dimension
for them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from headway.models.description import AltUp, GatedDelta, LatentAttention, Mamba2, PerLayer, ShortConv

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def model_shapes(c: ModelConfig) -> Shapes:
    """The weights outside of layers; a tied output is the embedding."""
    d, e = c.description, c.hidden_size
    shapes: Shapes = {"embedding": (c.vocab_size, e)}
    if d.learned_positions:
        shapes["positions"] = (c.max_positions, e)
    if d.per_layer is not None and (inputs := d.per_layer.inputs) is not None:
        every = c.layers * inputs.size
        shapes |= {"token_inputs": (inputs.vocab, every), "input_projection": (every, e)}
        shapes["input_projection_norm"] = (inputs.size,)
    if d.altup is not None:
        others = d.altup.streams - 1
        shapes |= {"altup_spread": (others, e, e), "altup_gather": (others, e, e)}
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
    if layer in d.recurrent_layers:
        shapes |= _recurrent(c)
    if d.both or layer not in d.recurrent_layers:
        shapes |= _attention(c, layer)
    if d.per_layer is not None:
        shapes |= _of_token(c, d.per_layer)
    if d.altup is not None:
        shapes |= _altup(e, d.altup)
    return shapes if d.no_feed_forward else shapes | _feed_forward(c, layer)


def has_experts(c: ModelConfig, layer: int) -> bool:
    """Whether a layer's feed-forward is experts, and nothing else."""
    experts = c.description.experts
    return experts is not None and layer not in experts.dense_layers and not experts.beside_dense


def parameters(c: ModelConfig, *, active: bool = False) -> int:
    """The number of parameters, or of those that one token uses: not all experts, and one row of the embedding."""
    total = sum(map(prod, model_shapes(c).values()))
    if active and not c.tied:
        total -= (c.vocab_size - 1) * c.hidden_size
    if active and (table := model_shapes(c).get("token_inputs")) is not None:
        total -= (table[0] - 1) * table[1]
    for layer in range(c.layers):
        for role, shape in layer_shapes(c, layer).items():
            if role == "layer_scale":  # a constant
                continue
            experts = c.description.experts
            per = experts.per_token / experts.count if active and experts and role.startswith("expert_") else 1
            total += round(prod(shape) * per)
    return total


def _norms(c: ModelConfig) -> list[str]:
    d = c.description
    before = ["input_norm"] if d.one_norm or d.no_feed_forward else ["input_norm", "mlp_norm"]
    after = ["post_attention_norm", "post_mlp_norm"]
    return {"before": before, "after": after, "both": before + after}[d.norm_place]


def _norm(role: str, size: int, bias: bool) -> Shapes:
    return {role: (size,), f"{role}_bias": (size,)} if bias else {role: (size,)}


def _attention(c: ModelConfig, layer: int) -> Shapes:
    if c.description.latent is not None:
        return _latent(c, c.description.latent)
    if c.description.per_layer is not None:
        return _own_heads(c, c.description.per_layer, layer)
    e, d, q, kv = c.hidden_size, c.head_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = _matrices({"q": (q, e), "k": (kv, e), "v": (kv, e)}, c.qkv_bias) | _matrices({"o": (e, q)}, c.o_bias)
    if c.qk_norm and c.description.qk_norm != "unit":
        sizes = {"head": ((d,), (d,)), "row": ((q,), (kv,)), "each": ((c.heads, d), (c.kv_heads, d))}
        shapes["q_norm"], shapes["k_norm"] = sizes[c.description.qk_norm]
    if c.description.sinks:
        shapes["sinks"] = (c.heads,)
    if c.description.gated_attention:
        shapes |= _matrices({"attention_gate": (q, e)}, c.qkv_bias)
    return shapes


def _own_heads(c: ModelConfig, own: PerLayer, layer: int) -> Shapes:
    """Queries, and keys and values unless they are another layer's; no values where they are keys."""
    e, shape = c.hidden_size, own.kv_shapes[layer]
    q, kv = c.heads * shape.dim, shape.heads * shape.dim
    matrices, norms = {"q": (q, e)}, {"q_norm": (shape.dim,)}
    if own.kv_from[layer] == layer:
        matrices["k"], norms["k_norm"] = (kv, e), (shape.dim,)
        matrices |= {} if layer in own.keys_as_values else {"v": (kv, e)}
    return _matrices(matrices, c.qkv_bias) | _matrices({"o": (e, q)}, c.o_bias) | norms


def _of_token(c: ModelConfig, own: PerLayer) -> Shapes:
    """What a layer has for its input of the token, and its scale."""
    e, shapes = c.hidden_size, dict[str, tuple[int, ...]]()
    if own.inputs is not None:
        shapes = {"input_gate": (own.inputs.size, e), "input_out": (e, own.inputs.size), "post_input_norm": (e,)}
    return shapes | ({"layer_scale": (1,)} if own.scaled else {})


def _altup(e: int, how: AltUp) -> Shapes:
    """What a layer of several streams has besides: the low-rank product beside attention, and what predicts streams."""
    n = how.streams
    shapes: Shapes = {"laurel_down": (how.rank, e), "laurel_up": (e, how.rank), "laurel_norm": (e,)}
    shapes |= {"altup_norm": (e,), "altup_router": (n, e), "altup_predict": (n * n, n), "altup_correct": (n, n)}
    return shapes | {"altup_scale": (e,)}


def _latent(c: ModelConfig, how: LatentAttention) -> Shapes:
    """Matrices to the latent vectors of queries, and of keys and values, and from them to heads."""
    e, queries = c.hidden_size, c.heads * how.query_dim
    shapes: Shapes = {"q": (queries, e)}
    if how.query_size:
        shapes = _matrices({"q_down": (how.query_size, e)}, c.qkv_bias)
        shapes |= {"q_down_norm": (how.query_size,), "q_up": (queries, how.query_size)}
    shapes |= _matrices({"kv_down": (how.size + how.rotated, e)}, c.qkv_bias)
    shapes |= {"kv_down_norm": (how.size,), "key_up": (c.heads, how.size, how.key_dim)}
    shapes |= {"value_up": (c.heads, how.value_dim, how.size)}
    return shapes | _matrices({"o": (e, c.heads * how.value_dim)}, c.o_bias)


def _recurrent(c: ModelConfig) -> Shapes:
    """What a recurrent layer has in place of attention: matrices before and after the recurrence, a convolution."""
    e, how = c.hidden_size, c.description.recurrence
    match how:
        case ShortConv(taps, bias):
            shapes = _matrices({"mix_in": (3 * e, e), "mix_out": (e, e)}, bias)
            return shapes | {"conv": (e, taps)} | ({"conv_bias": (e,)} if bias else {})
        case GatedDelta():
            heads = (how.value_heads,)
            matrices: Shapes = {"mix_qkv": (how.channels, e), "mix_beta": (*heads, e), "mix_step": (*heads, e)}
            matrices |= {"mix_gate": (how.values, e), "mix_out": (e, how.values)}
            vectors: Shapes = {"step_bias": heads, "rate": heads, "mix_norm": (how.value_dim,)}
            return matrices | {"conv": (how.channels, how.taps)} | vectors
        case Mamba2():
            heads = (how.heads,)
            shapes = _matrices(
                {"mix_in": (how.inner + how.channels + how.heads, e), "mix_out": (e, how.inner)}, how.bias
            )
            shapes |= {"conv": (how.channels, how.taps)} | ({"conv_bias": (how.channels,)} if how.conv_bias else {})
            shapes |= {"step_bias": heads, "rate": heads, "skip": heads}
            return shapes | ({"mix_norm": (how.inner,)} if how.normed else {})
        case None:
            return {}


def _feed_forward(c: ModelConfig, layer: int) -> Shapes:
    e, f, d, x = c.hidden_size, c.inner(layer), c.description, c.description.experts
    shapes: Shapes = {}
    if not has_experts(c, layer):
        parts = {"gate": (f, e)} if d.gated else {}
        shapes = _matrices({**parts, "up": (f, e), "down": (e, f)}, c.mlp_bias)
    if x is None or layer in x.dense_layers:
        return shapes
    if x.beside_dense:
        shapes |= dict.fromkeys(("dense_norm", "expert_in_norm", "expert_out_norm", "router_scale"), (e,))
        shapes["expert_scale"] = (x.count,)
    shapes |= _matrices({"router": (x.count, e)}, x.router_bias)
    if x.groups is not None and x.groups.corrected:
        shapes["router_correction"] = (x.count,)
    experts = {"expert_gate": (x.size, e), "expert_up": (x.size, e), "expert_down": (e, x.size)}
    for role, shape in experts.items():
        shapes[role] = (x.count, *shape)
        if x.bias:
            shapes[f"{role}_bias"] = (x.count, shape[0])
    if x.shared_size:
        s = x.shared_size
        shapes |= {"shared_gate": (s, e), "shared_up": (s, e), "shared_down": (e, s)}
        shapes |= {"shared_router": (1, e)} if x.shared_gated else {}
    return shapes


def _matrices(shapes: dict[str, tuple[int, int]], bias: bool) -> Shapes:
    biases = {f"{role}_bias": shape[:1] for role, shape in shapes.items()} if bias else {}
    return {**shapes, **biases}
