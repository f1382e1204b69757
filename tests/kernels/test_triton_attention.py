"""PagedKV attention in Triton against the torch reference: any mask, any page size, heads, windows, trimmed pages.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headway.kernels.host.attention import AttentionGroup  # noqa: E402
from headway.kernels.reference.attention import attend  # noqa: E402
from headway.kernels.triton import attention, layout  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@dataclass
class Sequence:
    """Rows of one sequence: seen [R, slots] says what each attends to; pages with a number of `gone` are not there."""

    seen: np.ndarray
    gone: tuple[int, ...] = ()


@dataclass
class Case:
    """Sequences over one pool, as the reference and as the kernels take them."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    groups: list[AttentionGroup]
    ints: torch.Tensor
    segments: list[tuple[int, int]]
    rows: int


def make(
    sequences: list[Sequence],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    seed: int = 0,
    by_head: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Case:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-s.seen.shape[1] // page) for s in sequences]
    free = (rng.permutation(sum(counts)) + 1).tolist()
    rows = sum(len(s.seen) for s in sequences)
    size = (sum(counts) + 1, kv_heads, page, dim) if by_head else (sum(counts) + 1, page, kv_heads, dim)
    pool = torch.randn(2, *size, generator=generator)
    pool[:, 0] = float("nan")  # what is not there is never read
    pool = pool.to(DEVICE, dtype)
    keys, values = (p.transpose(1, 2) for p in pool) if by_head else pool
    groups, segments, after = [], [], []
    header = np.zeros((layout.columns(1), rows), np.int32)
    at, row = header.size, 0
    for sequence, count in zip(sequences, counts, strict=True):
        table = np.array([free.pop() for _ in range(count)])
        table[list(sequence.gone)] = 0
        seen = np.zeros((len(sequence.seen), count * page), bool)
        seen[:, : sequence.seen.shape[1]] = sequence.seen
        here = np.flatnonzero(table)
        kept = seen.reshape(len(seen), count, page)[:, here].reshape(len(seen), -1)
        index = torch.arange(row, row + len(seen))[None]
        parts = (index, torch.from_numpy(table[here])[None], torch.from_numpy(here)[None], torch.from_numpy(kept)[None])
        groups.append(AttentionGroup(*(p.to(DEVICE) for p in parts)))
        header[layout.PAGE_AT, row : row + len(seen)] = at
        header[layout.WHOLE, row : row + len(seen)] = int(len(here) == count)
        after.append(table)
        at += count
        for i, bits in enumerate(sequence.seen):
            edges = np.flatnonzero(np.diff(np.concatenate(([0], bits.astype(np.int8), [0]))))
            edge = (edges[0], edges[-1]) if len(edges) else (0, 0)
            header[layout.run_field(0) :, row + i] = (at, len(edges) // 2, *edge)
            after.append(edges)
            at += len(edges)
        segments.append((row, len(seen)))
        row += len(seen)
    ints = torch.from_numpy(np.concatenate([header.ravel(), *after]).astype(np.int32)).to(DEVICE)
    q = torch.randn(rows, heads, dim, generator=generator).to(DEVICE, dtype)
    return Case(q, keys, values, groups, ints, segments, rows)


def reference(case: Case, scale: float) -> torch.Tensor:
    keys, values = case.keys.float().nan_to_num(), case.values.float().nan_to_num()
    return attend(case.q.float(), keys, values, case.groups, scale)


def by_rows(case: Case, splits: attention.Splits, which: torch.Tensor | None = None, **paged: object) -> torch.Tensor:
    heads, dim = case.q.shape[1:]
    out = torch.full_like(case.q, float("nan"))
    room = attention.make_scratch(case.rows, heads, case.keys.shape[2], dim, splits, case.q.device)
    attention.attend_rows(case.q, out, _paged(case, **paged), splits, room, which=which)
    assert int(room.arrived.abs().sum()) == 0
    return out


def by_chunks(case: Case, **paged: object) -> torch.Tensor:
    heads, dim = case.q.shape[1:]
    out = torch.full_like(case.q, float("nan"))
    tokens = attention.chunk_tokens(heads, case.keys.shape[2], dim, case.q.dtype)
    numbers = [*attention.chunk_items(case.segments, tokens), 0, 0]  # the last item has no rows
    items = torch.tensor(numbers, dtype=torch.int32).view(-1, 2).to(DEVICE)
    attention.attend_chunks(case.q, out, _paged(case, **paged), items, tokens)
    return out


def _paged(case: Case, **more: object) -> attention.PagedKV:
    scale = case.q.shape[2] ** -0.5
    return attention.PagedKV(case.keys, case.values, case.ints, case.rows, layout.run_field(0), scale, **more)  # type: ignore[arg-type]


def causal(rows: int, slots: int, window: int | None = None, sink: int = 0) -> np.ndarray:
    at = np.arange(slots - rows, slots)[:, None]
    slot = np.arange(slots)[None]
    seen = slot <= at
    return seen if window is None else seen & ((at - slot < window) | (slot < sink))


def close(found: torch.Tensor, expected: torch.Tensor, limit: float = 2e-5) -> None:
    assert not bool(found.isnan().any())
    assert float((found.float() - expected).norm() / expected.norm()) < limit


SHAPES = [(4, 2, 16, 16), (6, 1, 80, 5), (9, 3, 64, 16), (8, 8, 32, 5), (32, 8, 128, 16), (4, 2, 256, 32)]
# In the interpreter two shapes show what all of them do: heads and sizes that are powers of two, and that are not.
SLOWER = () if DEVICE == "cuda" else pytest.mark.slow
SHAPES = [*SHAPES[:2], *(pytest.param(*shape, marks=SLOWER) for shape in SHAPES[2:])]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), SHAPES)
@pytest.mark.parametrize("by_head", [True, pytest.param(False, marks=SLOWER)])
def test_rows_by_themselves_equal_the_reference(heads: int, kv_heads: int, dim: int, page: int, by_head: bool) -> None:
    sequences = [Sequence(causal(1, n)) for n in (1, 31, 32, 33, 150)]
    sequences += [Sequence(causal(1, 150, 40)), Sequence(causal(1, 150, 40, 4)), Sequence(causal(3, 70))]
    case = make(sequences, heads=heads, kv_heads=kv_heads, dim=dim, page=page, by_head=by_head)
    expected = reference(case, dim**-0.5)
    for splits in (attention.Splits(1, 64), attention.Splits(4, 32), attention.Splits(16, 32)):
        close(by_rows(case, splits), expected)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), SHAPES)
def test_chunks_equal_the_reference(heads: int, kv_heads: int, dim: int, page: int) -> None:
    sequences = [
        Sequence(causal(1, 1)),
        Sequence(causal(40, 40)),
        Sequence(causal(21, 130)),
        Sequence(causal(50, 90, 20)),
    ]
    sequences += [Sequence(causal(20, 90, 20, 4))]
    case = make(sequences, heads=heads, kv_heads=kv_heads, dim=dim, page=page)
    close(by_chunks(case), reference(case, dim**-0.5))


@settings(max_examples=25 if DEVICE == "cuda" else 8, deadline=None)
@given(st.data())
def test_any_mask_over_any_pages_equals_the_reference(data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([1, 3, 16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    sequences = []
    for _ in range(data.draw(st.integers(1, 3))):
        slots, rows = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 6))
        seen = rng.random((rows, slots)) < data.draw(st.sampled_from([0.02, 0.5, 0.95]))
        seen[np.arange(rows), rng.integers(0, slots, rows)] = True
        pages = -(-slots // page)
        gone = tuple(n for n in range(pages) if not seen[:, n * page : (n + 1) * page].any() and rng.random() < 0.7)
        sequences.append(Sequence(seen, gone))
    case = make(sequences, heads=4, kv_heads=2, dim=16, page=page, seed=7)
    expected = reference(case, 0.25)
    close(by_rows(case, attention.Splits(4, 32)), expected)
    close(by_chunks(case), expected)


def test_pages_that_are_not_there_are_not_attended_to_even_where_a_mask_says_so() -> None:
    whole = causal(2, 100)
    case = make([Sequence(whole, gone=(1, 2, 5))], heads=4, kv_heads=2, dim=16, page=16)
    expected = reference(case, 0.25)
    close(by_rows(case, attention.Splits(4, 32)), expected)
    close(by_chunks(case), expected)


def test_a_row_has_the_same_bits_whatever_shares_its_step_and_whatever_is_trimmed() -> None:
    seen = causal(1, 200, 60, 4)
    others = [Sequence(causal(1, n)) for n in (5, 170)]
    splits = attention.Splits(8, 32)
    alone = make([Sequence(seen)], heads=4, kv_heads=2, dim=32, page=16)
    found = by_rows(alone, splits)
    trimmed = [Case(**{**vars(alone)}), alone]
    table = alone.ints.clone()
    at = int(table[layout.PAGE_AT])
    table[at + 1 : at + 8] = 0  # pages inside the gap between sink and window
    trimmed[0].ints = table
    assert torch.equal(by_rows(trimmed[0], splits), found)
    among = make([Sequence(seen), *others], heads=4, kv_heads=2, dim=32, page=16)
    at, count = int(among.ints[layout.PAGE_AT * 3]), -(-200 // 16)
    pages, old = among.ints[at : at + count].long(), alone.ints[int(alone.ints[layout.PAGE_AT]) :][:count].long()
    among.keys[pages], among.values[pages] = alone.keys[old], alone.values[old]
    among.q[0] = alone.q[0]
    assert torch.equal(by_rows(among, splits)[0], found[0])


def test_chosen_rows_alone_are_computed() -> None:
    case = make([Sequence(causal(1, n)) for n in (40, 50, 60)], heads=4, kv_heads=2, dim=16, page=16)
    which = torch.tensor([2, -1, 0, -1], dtype=torch.int32, device=DEVICE)
    found = by_rows(case, attention.Splits(2, 32), which)
    expected = reference(case, 0.25)
    close(found[[0, 2]], expected[[0, 2]])
    assert bool(found[1].isnan().all())


def test_a_row_that_attends_to_nothing_gives_zeros() -> None:
    seen = np.stack([np.zeros(40, bool), causal(1, 40)[0]])
    case = make([Sequence(seen)], heads=4, kv_heads=2, dim=16, page=16)
    for found in (by_rows(case, attention.Splits(2, 32)), by_chunks(case)):
        assert bool((found[0] == 0).all())
        close(found[1:], reference(case, 0.25)[1:])


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_softcap_and_sinks_mean_what_a_dense_softmax_says(softcap: float) -> None:
    slots, heads, kv_heads, dim = 150, 6, 2, 32
    case = make([Sequence(causal(5, slots))], heads=heads, kv_heads=kv_heads, dim=dim, page=16)
    sinks = torch.linspace(-2, 3, heads).to(DEVICE)
    pages = case.groups[0].pages[0]
    keys = case.keys[pages].flatten(0, 1)[:slots].repeat_interleave(heads // kv_heads, 1)
    values = case.values[pages].flatten(0, 1)[:slots].repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("ihd,jhd->hij", case.q, keys) * dim**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.from_numpy(causal(5, slots)).to(DEVICE), float("-inf"))
    probs = torch.cat([scores, sinks[:, None, None].expand(-1, 5, 1)], -1).softmax(-1)[..., :-1]
    expected = torch.einsum("hij,jhd->ihd", probs, values)
    for splits in (attention.Splits(1, 64), attention.Splits(4, 32)):
        close(by_rows(case, splits, softcap=softcap, sinks=sinks), expected)
    close(by_chunks(case, softcap=softcap, sinks=sinks), expected)
