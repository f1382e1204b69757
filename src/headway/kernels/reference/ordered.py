"""The arithmetic of quantized models, sum by sum: what the native step computes, in torch and to the bit.

Activations in 8 bits amplify rounding: where two orders of summation differ in the last bit, a value may fall on the
next of 255 steps, and a few layers later the logits differ as if all had been quantized anew. So a quantized format
also fixes the order of every sum, for every runner: products are added by fused multiply-adds, in 16 lanes or one after
the other, and keys are attended to in chunks of 128 slots. A row's bits then depend on the row alone.

A fused multiply-add goes through float64, in which the product is exact; once in 2^29 the two roundings of the sum
differ from one. `ordered_matmul` has the matmul; the native side is simd.h, step.cpp and attention.h.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headway.kernels.reference import experts
from headway.kernels.reference.attention import AttentionGroup, aligned, as_bfloat16, rounds_queries

LANES = 16
CHUNK = 128  # slots per partial sum
ELEMENTS = 1 << 21  # of one intermediate of attention


def fma_sum(shape: Sequence[int], factors: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of a × b over pairs of factors → [*shape], first to last, each multiply-add rounded once to float32."""
    total, rounded = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
    for a, b in factors:
        total.addcmul_(a.double(), b.double())
        total.copy_(rounded.copy_(total))
    return rounded


def fma(a: Tensor | float, b: Tensor, c: Tensor | float) -> Tensor:
    """a × b + c, rounded once. Numbers are taken as float32."""
    a, c = (v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float32) for v in (a, c))
    return (a.double() * b.double() + c.double()).float()


def lane_sum(x: Tensor) -> Tensor:
    """The sum over 16 lanes [..., 16] → [..., 1], halves onto halves."""
    while x.shape[-1] > 1:
        first, last = x.chunk(2, -1)
        x = first + last
    return x


def exp(x: Tensor) -> Tensor:
    """e^x by the native step's polynomial."""
    x = x.clamp(-104.0, 89.0)
    n = torch.round(x * 1.44269504088896341)
    r = fma(2.12194440e-4, n, fma(-0.693359375, n, x))
    p = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, c)
    p = fma(p, r * r, r + 1)
    return (p.double() * torch.exp2(n.double())).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., E] scaled to unit mean square, times weight [E]."""
    return weight * (x * _inverse_root(_mean(x, x), eps))


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """x [..., E] scaled to unit mean square."""
    return x * _inverse_root(_mean(x, x), eps)


def as_large_as(x: Tensor, y: Tensor, least: float) -> Tensor:
    """y [..., E] with the mean square of x; its own counts as `least` at least."""
    return y * _root(_mean(x, x)) / _root(_mean(y, y).clamp(min=least))


def cut_off(x: Tensor, deviations: float) -> Tensor:
    """What is above the mean of x [..., F] by so many standard deviations, and 0 for the rest."""
    mean = _mean(x, torch.ones_like(x))
    centered = x - mean
    return torch.relu(x - (mean + _root(_mean(centered, centered)) * deviations))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., E] minus its mean, scaled to unit variance, times weight [E], plus bias [E]."""
    centered = x - _mean(x, torch.ones_like(x))
    y = weight * (centered * _inverse_root(_mean(centered, centered), eps))
    return y if bias is None else y + bias


def _mean(a: Tensor, b: Tensor) -> Tensor:
    """The mean of a × b [..., E] → [..., 1]."""
    e, whole = a.shape[-1], a.shape[-1] // LANES * LANES
    lanes = (x[..., :whole].unflatten(-1, (-1, LANES)).movedim(-2, 0) for x in (a, b))  # [E / 16, ..., 16]
    total = lane_sum(fma_sum((*a.shape[:-1], LANES), zip(*lanes, strict=True)))
    for i in range(whole, e):
        total = total + a[..., i : i + 1] * b[..., i : i + 1]
    return total / torch.full_like(total, e)


def _inverse_root(x: Tensor, eps: float) -> Tensor:
    root = _root(x + eps)
    return torch.ones_like(root) / root


def _root(x: Tensor) -> Tensor:
    return x.double().sqrt().float()  # torch's own of float32 errs in the last bit


def activate(x: Tensor, kind: str) -> Tensor:
    """silu, gelu or gelu_tanh of x."""
    match kind:
        case "silu":
            return x / (1 + exp(-x))
        case "gelu":
            return x * 0.5 * (1 + torch.erf((x * math.sqrt(0.5)).double()).float())
        case "gelu_tanh":
            y = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
            return x / (1 + exp(-2 * y))
    raise AssertionError(kind)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) × up for gate_up [R, 2F] → [R, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, "silu") * up


def capped(x: Tensor, cap: float | None) -> Tensor:
    """x bounded softly by a cap."""
    return x if cap is None else (1 - 2 / (exp(x / cap * 2) + 1)) * cap


def route(logits: Tensor, count: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """`experts.route` in the native step's order."""
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    chosen = ids[:, :count]
    weights = exp(ranked[:, :count] - ranked[:, :1])
    parts = weights if normalize else exp(logits - ranked[:, :1])
    return chosen, weights / _in_order(parts)


def route_by_groups(
    logits: Tensor,
    count: int,
    *,
    score: str,
    correction: Tensor | None,
    normalize: bool,
    scale: float,
    **groups: int,
) -> tuple[Tensor, Tensor]:
    """`experts.route_by_groups` in the native step's order."""
    if score == "sigmoid":
        scores = 1 / (1 + exp(-logits))
    else:
        scores = exp(logits - logits.max(-1, keepdim=True).values)
        scores = scores / _in_order(scores)
    ranked = scores if correction is None else scores + correction
    chosen = experts.choose_by_groups(ranked, count, **groups)
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / (_in_order(weights) + 1e-20)
    return chosen, weights * scale


def _in_order(parts: Tensor) -> Tensor:
    """The sum over the last dimension [R, X] → [R, 1], first to last."""
    total = torch.zeros_like(parts[:, 0])
    for part in parts.unbind(1):
        total = total + part
    return total[:, None]


def rotation(inv_freq: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every row's angles, correctly rounded: positions [T] → two [T, 1, D]."""
    angles = (positions.float()[:, None] * inv_freq[None, :]).double()  # [T, D/2]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().float() * scale, angles.sin().float() * scale


# -- attention -----------------------------------------------------------------------------------------------------


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[AttentionGroup],
    scale: float,
    *,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, D] over pages k, v [P, page, Hkv, D] → [T, H, D]: `attention.attend` in the native step's order.

    With bfloat16 pages queries and softmax weights are rounded to bfloat16 too, weights relative to the largest of
    their chunk; the sum that they are divided by is not.
    """
    to_bf16 = rounds_queries(q, k)
    own = None if sinks is None else sinks.view(k.shape[2], -1)  # [Hkv, G]
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for group in groups:
        keys, values, seen = aligned(k, v, group, CHUNK)  # [N, B, CHUNK, Hkv, D] twice, [N, M, B, CHUNK]
        for i, rows in enumerate(group.rows):
            share = max(1, ELEMENTS // (q.shape[1] * seen[0, 0].numel()))
            for first, part in zip(range(0, len(rows), share), rows.split(share), strict=True):
                queries = q[part].unflatten(1, (k.shape[2], -1)) * scale  # [r, Hkv, G, D]
                mask = seen[i, first : first + len(part)]
                mixed = _attend_rows(queries, keys[i], values[i], mask, cap=cap, sinks=own, to_bf16=to_bf16)
                out[part] = mixed.flatten(1, 2)
    return out


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, cap: float | None, sinks: Tensor | None, to_bf16: bool
) -> Tensor:
    """q [r, Hkv, G, D] over keys and values [B, CHUNK, Hkv, D], of which a row attends to seen [r, B, CHUNK]."""
    q = as_bfloat16(q) if to_bf16 else q
    used = int(seen.any(0).any(0).nonzero().max()) + 1  # of each chunk
    used = -(-used // LANES) * LANES
    k, v, seen = k[:, :used], v[:, :used], seen[:, :, :used]
    seen = seen[:, :, None, None]  # [r, B, 1, 1, S]
    scores = capped(_scores(q, k), cap).masked_fill(~seen, -torch.inf)  # [r, B, Hkv, G, S]
    some = seen.any(-1)  # [r, B, 1, 1]
    most = scores.amax(-1)  # [r, B, Hkv, G]
    weights = exp(scores - torch.where(some, most, 0)[..., None])
    weights = torch.where(seen, weights, 0)
    sums = torch.zeros_like(weights[..., :LANES])
    for unit in weights.split(LANES, -1):
        sums = sums + unit
    weights = as_bfloat16(weights) if to_bf16 else weights
    slots = zip(v.transpose(0, 1)[:, None, :, :, None], weights.movedim(-1, 0)[..., None], strict=True)
    mixed = fma_sum((*most.shape, v.shape[-1]), slots)
    return _merge(most, lane_sum(sums)[..., 0], mixed, some.expand_as(most), sinks)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q [r, Hkv, G, D] times k [B, S, Hkv, D] → [r, B, Hkv, G, S]; even and odd dimensions are summed apart."""
    if q.shape[-1] % 2:
        q, k = (torch.nn.functional.pad(x, (0, 1)) for x in (q, k))
    a = k.permute(3, 0, 2, 1)[:, None, :, :, None].unflatten(0, (-1, 2))  # [D/2, 2, 1, B, Hkv, 1, S]
    b = q.movedim(-1, 0)[:, :, None, :, :, None].unflatten(0, (-1, 2))  # [D/2, 2, r, 1, Hkv, G, 1]
    shape = (2, q.shape[0], k.shape[0], q.shape[1], q.shape[2], k.shape[1])
    even, odd = fma_sum(shape, zip(a, b, strict=True))
    return even + odd


def _merge(most: Tensor, sums: Tensor, mixed: Tensor, some: Tensor, sinks: Tensor | None) -> Tensor:
    """The chunks [r, B, Hkv, G, …] in ascending order → [r, Hkv, G, D]; `some` says which attend to anything."""
    top, total, values, begun = most[:, 0], sums[:, 0], mixed[:, 0], some[:, 0]
    for b in range(1, most.shape[1]):
        high = torch.maximum(top, most[:, b])
        high = torch.where(high.isneginf(), 0, high)
        old, new = exp(top - high), exp(most[:, b] - high)
        both = begun & some[:, b]
        alone = some[:, b] & ~begun
        joined = fma(mixed[:, b], new[..., None], values * old[..., None])
        values = torch.where(both[..., None], joined, torch.where(alone[..., None], mixed[:, b], values))
        total = torch.where(both, total * old + sums[:, b] * new, torch.where(alone, sums[:, b], total))
        top = torch.where(both, high, torch.where(alone, most[:, b], top))
        begun = begun | some[:, b]
    total = total if sinks is None else total + exp(sinks - top)
    return values * (torch.ones_like(total) / total)[..., None]
