"""Pages that rows share, read once for all of them: which they are, and attention over them and over a row's own.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.base.specs.brle import Brle  # noqa: E402
from headway.kernels.triton import attention, layout  # noqa: E402
from headway.kernels.triton.attention_parts import attend_shared  # noqa: E402
from headway.runtime.batch import Batch, DecodeRows  # noqa: E402
from headway.runtime.runners.cuda import model as cuda_model  # noqa: E402
from headway.runtime.runners.cuda.arrays import StepInts  # noqa: E402
from headway.runtime.runners.cuda.attention import shared_pages  # noqa: E402
from headway.runtime.runners.cuda.attention.shared_pages import SharedPages, SharedRoom, SharedRun, shared_runs  # noqa: E402
from headway.testing import random_model  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SIZE = 4
V = 97


@pytest.fixture
def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pages, "MUCH", 1)
    monkeypatch.setattr(shared_pages, "LEAST", SIZE)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_model, "PROGRAMS", 8)


def tables(*pages: list[int]) -> list[np.ndarray]:
    return [np.array(p, dtype=np.int64) for p in pages]


def test_rows_and_their_common_pages_are_the_nodes_of_a_tree(share_all: None) -> None:
    found = shared_runs(tables([1, 2, 3, 4], [9], [1, 2, 3, 5], [1, 2, 6], [], [1, 2, 6, 7]), SIZE)
    assert found == [SharedRun((0, 2, 3, 5), 0, 2), SharedRun((0, 2), 2, 3), SharedRun((3, 5), 2, 3)]


def test_a_short_node_is_left_to_those_below_it(share_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pages, "LEAST", 3 * SIZE)
    found = shared_runs(tables([1, 2, 3, 4], [1, 2, 3, 5], [1, 6]), SIZE)
    assert found == [SharedRun((0, 1), 0, 3)]


def test_little_that_is_shared_is_read_by_each_row_as_before() -> None:
    several = tables(*[[*range(1, 40), 100 + i] for i in range(8)])
    assert shared_runs(several, 16) == []
    assert shared_runs(tables(*[[*range(1, 400), 1000 + i] for i in range(8)]), 16) == [
        SharedRun(tuple(range(8)), 0, 399)
    ]


def decode_rows(pages: list[np.ndarray], slots: list[int], group: object) -> DecodeRows:
    count = len(pages)
    return DecodeRows(
        tokens=np.zeros(count, np.int64),
        positions=np.array(slots),
        slots=np.array(slots),
        write_slots=np.array([int(p[s // SIZE]) * SIZE + s % SIZE for p, s in zip(pages, slots, strict=True)]),
        pages=np.concatenate(pages),
        page_ends=np.cumsum([len(p) for p in pages]),
        masks=None,
        readouts=(),
        seeds=np.zeros(count, np.uint64),
        group=group,
    )


def finder(programs: int = 4, tile: int = 8) -> SharedPages:
    return SharedPages(torch.device(DEVICE), SIZE, tile=tile, programs=programs, rows=64)


def test_what_is_shared_is_found_once_for_the_same_sequences(share_all: None) -> None:
    pages, group, pool = tables([1, 2, 3], [1, 2, 4]), object(), finder()
    first = pool.find(decode_rows(pages, [9, 10], group))
    assert first is not None
    assert first.starts.tolist() == [8, 8]
    assert pool.find(decode_rows(pages, [10, 11], group)) is first
    assert pool.find(decode_rows(tables([1, 2], [3, 4]), [6, 7], object())) is None
    assert pool.find(decode_rows(pages, [9, 10], None)) is None


def test_a_page_that_is_being_written_is_not_shared(share_all: None) -> None:
    step = finder().find(decode_rows(tables([1, 2], [1, 2]), [4, 6], object()))
    assert step is not None
    assert step.starts.tolist() == [4, 4]


def test_rows_with_masks_of_their_own_share_nothing(share_all: None) -> None:
    pool, rows = finder(), decode_rows(tables([1, 2, 3], [1, 2, 4], [1, 2, 5]), [8, 8, 8], object())
    mask = Brle.from_intervals(9, [(2, 9)])
    step = pool.find(replace(rows, masks=(None, mask, None)))
    assert step is not None
    assert step.starts.tolist() == [8, 0, 8]
    assert pool.find(replace(rows, masks=(mask, mask, None))) is None


@settings(max_examples=40 if DEVICE == "cuda" else 5, deadline=None)
@given(st.data())
def test_attention_over_shared_pages_equals_dense_attention(data: st.DataObject) -> None:
    heads, kv_heads, dim = 4, 2, 16
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    count = data.draw(st.integers(1, 12))
    pages, slots, free = tree(rng, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_pages, "MUCH", 1)
        patch.setattr(shared_pages, "LEAST", SIZE)
        rows = decode_rows(pages, slots, object())
        step = finder(data.draw(st.sampled_from([1, 4, 30])), data.draw(st.sampled_from([1, 3, 8]))).find(rows)
    pool = torch.randn(2, free, kv_heads, SIZE, dim, generator=torch.Generator().manual_seed(count)).to(DEVICE)
    pool[:, 0] = float("nan")
    keys, values = (p.transpose(1, 2) for p in pool)
    ints = StepInts((None,), SIZE)
    none = np.empty(0, np.int64)
    batch = Batch(none, none, none, none, (), rows)
    numbers = ints.read(batch, None if step is None else step.starts)
    host = np.zeros(ints.size(numbers, count), np.int32)
    ints.fill(host, batch, numbers, count)
    paged = attention.PagedKV(keys, values, torch.from_numpy(host).to(DEVICE), count, layout.run_field(0), dim**-0.5)
    q = torch.randn(count, heads, dim).to(DEVICE)
    out = torch.full_like(q, float("nan"))
    shared = None
    if step is not None:
        shared = SharedRoom(heads, dim, q.device).keys(step)
        attend_shared(q, paged, shared, step.members, step.items)
    splits = data.draw(st.sampled_from([attention.Splits(1, 64), attention.Splits(4, 32)]))
    room = attention.make_scratch(count, heads, kv_heads, dim, splits, q.device)
    attention.attend_rows(q, out, paged, splits, room, shared=shared)
    for i, (table, slot) in enumerate(zip(pages, slots, strict=True)):
        k, v = (p[torch.from_numpy(table).to(DEVICE)].flatten(0, 1)[: slot + 1].double() for p in (keys, values))
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        weights = (torch.einsum("hd,jhd->hj", q[i].double(), k) * dim**-0.5).softmax(-1)
        expected = torch.einsum("hj,jhd->hd", weights, v)
        assert float((out[i] - expected).abs().max()) < 1e-5


def tree(rng: np.random.Generator, count: int) -> tuple[list[np.ndarray], list[int], int]:
    """Page tables of forks of forks, the slot each row stands at, and the first page that nobody has."""
    known: list[list[int]] = [[]]
    free, found, slots = 1, [], []
    for _ in range(count):
        before = known[rng.integers(len(known))]
        trunk = before[: rng.integers(len(before) + 1)] if rng.random() < 0.3 else list(before)
        more = int(rng.integers(0, 12))
        trunk = [*trunk, *range(free, free + more)]
        known.append(trunk)
        found.append(np.array([*trunk, free + more]))
        slots.append(len(trunk) * SIZE + int(rng.integers(SIZE)))
        free += more + 1
    return found, slots, free


async def forks(engine: hw.Engine) -> list[list[int]]:
    """Decoding forks of forks, one of them with a mask, beside a sequence that shares nothing."""
    rng = np.random.default_rng(5)
    async with engine.context() as root, engine.context() as lone:
        await root.fill(rng.integers(0, V, 17).tolist()).flush()
        child = root.fork().fill(rng.integers(0, V, 16).tolist())
        await child.flush()
        twins = [root.fork().fill([i]) for i in range(2)] + [child.fork().fill([i]) for i in range(2)]
        all_rows = [*twins, lone.fill([5, 6])]

        async def one(i: int, ctx: hw.Context) -> list[int]:
            how = hw.Multinomial(seed=i)
            mask = hw.Mask.window(10) if i == 1 else None
            return await ctx.generate(how, max_tokens=4 + i % 2, stop_only=True, attention_mask=mask).tokens()

        return list(await asyncio.gather(*(one(i, ctx) for i, ctx in enumerate(all_rows))))


@pytest.mark.usefixtures("share_all")
def test_forks_decode_the_same_tokens_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "heads": 2, "kv_heads": 1}
    model = random_model(device=DEVICE, **({} if DEVICE == "cuda" else small))
    found, shared = {}, 0
    find = SharedPages.find

    def counted(self: SharedPages, decode: DecodeRows | None) -> object:
        nonlocal shared
        step = find(self, decode)
        shared += step is not None
        return step

    monkeypatch.setattr(SharedPages, "find", counted)
    for mode in ("triton", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        with hw.Engine(model, pages=64, threads=1) as engine:
            found[mode] = engine.run(forks)
    assert found["triton"] == found["off"]
    assert shared > 2
