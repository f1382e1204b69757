"""Paged attention: the torch reference, for a ragged batch of prefill and decode rows.

Two functions with one meaning. `attend` gathers each group's pages and uses torch's fused attention. `attend_exact`
computes every row on its own, its keys split at fixed absolute slots and combined in order, so that a row's bits depend
on nothing but its query and the slots it sees. Floats over bfloat16 pages are for `ordered.attend`, which rounds as the
native step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.host.attention import AttentionGroup
from headway.kernels.reference.linear import by_rows

SPLIT = 64  # slots per partial sum in attend_exact
UNIT = 1 << 22  # elements of one intermediate in attend_exact
UNITS = 64  # (row, split) pairs that a GPU sums at a time


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
    """q [T, H, D] over pages k, v [P, page, Hkv, D] → [T, H, D]; values may have a width of their own.

    A `cap` bounds scores softly; `sinks` [H] are scores of a slot of zeros that every row sees.
    """
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for group in groups:
        n, m = group.rows.shape
        keys, values = (_gather(x, group.pages).to(q.dtype) for x in (k, v))  # [N, Hkv, S, D]
        heads = keys.shape[1]
        # Query heads that share a key head become rows of one matmul: [N, Hkv, G*M, D], no repeated keys.
        queries = q[group.rows].unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # [N, Hkv, G, M, D]
        share = queries.shape[2]
        mask = group.mask[:, None, None].expand(n, 1, share, m, -1).flatten(2, 3)  # [N, 1, G*M, S]
        if cap is None and sinks is None:
            mixed = F.scaled_dot_product_attention(queries.flatten(2, 3), keys, values, attn_mask=mask, scale=scale)
        else:
            raw = capped(queries.flatten(2, 3).float() @ keys.float().transpose(2, 3) * scale, cap)  # [N, Hkv, G*M, S]
            raw = raw.masked_fill(~mask, float("-inf"))
            if sinks is not None:
                own = sinks.float().view(heads, share, 1).expand(n, -1, -1, m).reshape(n, heads, share * m, 1)
                raw = torch.cat((raw, own), -1)
            mixed = (raw.softmax(-1)[..., : keys.shape[2]] @ values.float()).to(q.dtype)
        out[group.rows] = mixed.unflatten(2, (share, m)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out


def attend_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[AttentionGroup],
    scale: float,
    *,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `attend`, with bits that do not depend on other rows, on trimmed pages or on how rows were grouped."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for group in groups:
        n = len(group.rows)
        heads, dim = k.shape[2], k.shape[3]
        cost = SPLIT * q.shape[1] * dim
        keys, values, seen = aligned(k, v, group)  # [N, B, SPLIT, Hkv, D] twice, [N, M, B, SPLIT]
        for i in range(n):
            for rows in group.rows[i].split(max(1, UNIT // (cost * keys.shape[1]))):
                first = int(rows[0] - group.rows[i][0])
                queries = q[rows].float().unflatten(1, (heads, -1)) * scale  # [r, Hkv, G, D]
                mask = seen[i, first : first + len(rows)]  # [r, B, SPLIT]
                out[rows] = _row_sums(queries, keys[i], values[i], mask, cap=cap, sinks=sinks).to(q.dtype)
    return out


def scores(
    q: Tensor,
    k: Tensor,
    group: AttentionGroup,
    scale: float,
    *,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention probabilities of one sequence's rows: q [T, H, D] → [M, H, S] float32, S in absolute slots."""
    heads = k.shape[2]
    keys, _, seen = aligned(k, k, group)
    queries = q[group.rows[0]].float().unflatten(1, (heads, -1)) * scale
    queries = as_bfloat16(queries) if rounds_queries(q, k) else queries
    weight, total = _weights(queries, keys[0], seen[0], cap, sinks)
    return (weight / total[:, None, None]).flatten(1, 2).flatten(2).transpose(1, 2)  # from [M, B, SPLIT, Hkv, G]


def rounds_queries(q: Tensor, k: Tensor) -> bool:
    """Whether queries and softmax weights are rounded to bfloat16, as keys and values are."""
    return q.dtype == torch.float32 and k.dtype == torch.bfloat16


def as_bfloat16(x: Tensor) -> Tensor:
    """x rounded to bfloat16, in float32; below the least normal number 0."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0, x.to(torch.bfloat16).float())


def capped(raw: Tensor, cap: float | None) -> Tensor:
    """Scores bounded softly by a cap."""
    return raw if cap is None else torch.tanh(raw / cap) * cap


def _gather(pool: Tensor, pages: Tensor) -> Tensor:
    """pages [N, P] of pool [P, page, Hkv, D] → [N, Hkv, S, D]."""
    n = pages.shape[0]
    return pool.index_select(0, pages.flatten()).view(n, -1, *pool.shape[2:]).transpose(1, 2)


def aligned(k: Tensor, v: Tensor, group: AttentionGroup, split: int = SPLIT) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and mask by absolute slot: trimmed pages are masked zeros, padded to whole splits."""
    n, m = group.rows.shape
    page = k.shape[1]
    last = int(group.numbers.max()) + 1
    slots = -(-(last * page) // split) * split
    index = (group.numbers[:, :, None] * page + torch.arange(page, device=k.device)).flatten(1)  # [N, S]
    index = torch.where(index < 0, slots, index)  # filler goes to a spare slot that is cut off
    keys, values = (torch.zeros(n, slots + 1, *x.shape[2:], dtype=torch.float32, device=k.device) for x in (k, v))
    seen = torch.zeros(n, m, slots + 1, dtype=torch.bool, device=k.device)
    for into, pool in ((keys, k), (values, v)):
        spread = index[:, :, None, None].expand(-1, -1, *pool.shape[2:])
        into.scatter_(1, spread, _gather(pool, group.pages).transpose(1, 2).float())
    seen.scatter_(2, index[:, None].expand(-1, m, -1), group.mask)
    return (
        keys[:, :slots].unflatten(1, (-1, split)),
        values[:, :slots].unflatten(1, (-1, split)),
        seen[:, :, :slots].unflatten(2, (-1, split)),
    )


def _weights(q: Tensor, keys: Tensor, seen: Tensor, cap: float | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Unnormalized weights [r, B, SPLIT, Hkv, G] of q [r, Hkv, G, D] over keys [B, SPLIT, Hkv, D], and their sums.

    Everything is elementwise and summed over one fixed-length dimension, then over splits in order: a masked slot adds
    an exact zero, so leaving pages out changes no bit.
    """
    raw = _by_split(lambda a, k: (a[:, None] * k[:, :, :, None]).sum(-1), q, keys)
    raw = capped(raw, cap).masked_fill(~seen[..., None, None], float("-inf"))
    largest = raw.amax((1, 2), keepdim=True)  # [r, 1, 1, Hkv, G]
    own = None if sinks is None else sinks.float().view(1, 1, 1, *q.shape[1:3])
    largest = largest if own is None else torch.maximum(largest, own)
    weight = torch.exp(raw - largest)
    total = _in_order(_by_split(lambda w: w.sum(1), weight))
    return weight, total if own is None else total + torch.exp(own - largest)[:, 0, 0]


def _row_sums(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, *, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """The weighted values of q [r, Hkv, G, D] → [r, H, D]."""
    weight, total = _weights(q, keys, seen, cap, sinks)
    mixed = _in_order(_by_split(lambda w, v: (w[..., None] * v[:, :, :, None]).sum(1), weight, values))
    return (mixed / total[..., None]).flatten(1, 2)


def _by_split(fn: Callable[..., Tensor], rows: Tensor, shared: Tensor | None = None) -> Tensor:
    """fn for every (row, split) pair: rows [r, …] or [r, B, SPLIT, …], shared [B, SPLIT, …] → [r, B, …].

    A GPU's sums are ordered by the shape of the whole tensor, so there fn always sees UNITS pairs; on a CPU each sum
    depends on its own length alone, and splits run one at a time.
    """
    splits = len(shared) if shared is not None else rows.shape[1]
    whole = rows.ndim == 4  # one query for all splits
    if not rows.is_cuda:
        parts = [
            fn(*([rows] if whole else [rows[:, b]]), *([] if shared is None else [shared[b : b + 1]]))
            for b in range(splits)
        ]
        return torch.stack(parts, 1)
    pairs = [(rows[:, None].expand(-1, splits, *rows.shape[1:]) if whole else rows).flatten(0, 1)]
    if shared is not None:
        pairs.append(shared[None].expand(len(rows), *shared.shape).flatten(0, 1))
    (sums,) = by_rows(UNITS, lambda *unit: (fn(*unit),), *pairs)
    return sums.unflatten(0, (len(rows), splits))


def _in_order(parts: Tensor) -> Tensor:
    """The sum over splits of parts [r, B, …], first to last."""
    total = parts[:, 0]
    for b in range(1, parts.shape[1]):
        total = total + parts[:, b]
    return total
