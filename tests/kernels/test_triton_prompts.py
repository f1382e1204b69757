"""Whole causal prompts in squares and blocks against dense attention, and which segments of a step are such prompts.

Without a GPU the kernels run in Triton's interpreter and torch computes what cuDNN does on one.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.base.specs.brle import Brle  # noqa: E402
from headway.kernels.triton import layout  # noqa: E402
from headway.kernels.triton.attention import PagedKV  # noqa: E402
from headway.kernels.triton.attention_parts import gather, merge  # noqa: E402
from headway.runtime.batch import NO_POSITIONS, Batch, Segment  # noqa: E402
from headway.runtime.runners.cuda.attention import prompts  # noqa: E402
from headway.runtime.runners.cuda.attention.prompts import CausalPrompt, attend_prompt, find_prompts  # noqa: E402
from headway.testing import random_model  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 8


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> prompts.Results:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if causal:
        later = torch.arange(len(k))[None] > torch.arange(len(q))[:, None]
        scores = scores.masked_fill(later.to(q.device), float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).contiguous(), scores.logsumexp(-1)


def paged(slots: int, rows: int, row: int, seed: int = 0) -> tuple[PagedKV, torch.Tensor, torch.Tensor]:
    """A cache with a sequence of so many slots, which one row of a step has; and its keys and values."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-slots // PAGE)
    pool = torch.randn(2, pages + 1, KV_HEADS, PAGE, DIM, generator=generator)
    pool[:, 0] = float("nan")
    table = torch.randperm(pages, generator=generator) + 1
    ints = torch.zeros(layout.columns(1) * rows + pages, dtype=torch.int32)
    ints[layout.PAGE_AT * rows + row] = layout.columns(1) * rows
    ints[-pages:] = table
    pool = pool.to(DEVICE)
    keys, values = (p.transpose(1, 2) for p in pool)
    k, v = (p[table.to(DEVICE)].flatten(0, 1)[:slots] for p in (keys, values))
    return PagedKV(keys, values, ints.to(DEVICE), rows, layout.run_field(0), DIM**-0.5), k, v


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(("begin", "count", "room"), [(0, 21, 24), (16, 5, 8), (3, 70, 70), (8, 0, 4)])
def test_keys_and_values_are_gathered_from_pages_and_followed_by_zeros(begin: int, count: int, room: int) -> None:
    kv, keys, values = paged(80, 3, 1)
    found = torch.full((2, room, KV_HEADS, DIM), float("nan"), device=DEVICE)
    gather(kv, 1, begin, count, *found)
    for got, whole in zip(found, (keys, values), strict=True):
        assert torch.equal(got[:count], whole[begin : begin + count])
        assert not bool(got[count:].any())


def test_merged_results_are_those_over_all_keys() -> None:
    q, k, v = (torch.randn(n, h, DIM).to(DEVICE) for n, h in ((7, HEADS), (50, KV_HEADS), (50, KV_HEADS)))
    expected, sums = dense(q, k, v, False, 0.3)
    first, second = (dense(q, k[part], v[part], False, 0.3) for part in (slice(0, 20), slice(20, 50)))
    out, total = torch.empty_like(q), torch.empty_like(sums)
    merge(*first, *second, out, total)
    close(out, expected)
    close(total, sums)


@pytest.mark.parametrize(("rows", "slot"), [(8, 0), (13, 0), (16, 16), (9, 48), (20, 5), (11, 119)])
def test_prompts_in_squares_and_blocks_equal_dense_attention(
    rows: int, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROWS", 8), ("BLOCK", 16), ("LARGEST", 64)):
        monkeypatch.setattr(prompts, name, value)
    kv, keys, values = paged(slot + rows, rows + 5, 3)
    q = torch.randn(rows + 5, HEADS, DIM).to(DEVICE)
    out = torch.full_like(q, float("nan"))
    attend_prompt(q, out, kv, CausalPrompt(3, rows, slot), dense)
    whole = torch.cat([torch.zeros(slot, HEADS, DIM, device=DEVICE), q[3 : 3 + rows]])
    close(out[3 : 3 + rows], dense(whole, keys, values, True, kv.scale)[0][slot:])
    assert bool(out[:3].isnan().all())
    assert bool(out[3 + rows :].isnan().all())


def test_nan_in_other_rows_and_pages_does_not_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "ROWS", 16)
    kv, keys, values = paged(PAGE, 20, 4)
    kv.keys[:, 5:], kv.values[:, 5:] = float("nan"), float("nan")  # slots that nobody has written
    q = torch.full((20, HEADS, DIM), float("nan"), device=DEVICE)
    q[4:9] = 0.5
    out = torch.zeros_like(q)
    attend_prompt(q, out, kv, CausalPrompt(4, 5, 0), dense)
    close(out[4:9], dense(q[4:9], keys[:5], values[:5], True, kv.scale)[0])


@pytest.mark.parametrize("slot", [0, 1, 2047, 2048, 5000, 60_000, 131_000])
def test_blocks_and_what_is_left_are_all_earlier_slots(slot: int) -> None:
    prompt, at = CausalPrompt(0, 1500, slot), 0
    for begin, length in prompt.blocks:
        assert begin == at
        assert length in {2048, 4096, 8192, 16384}
        at += length
    assert at + prompt.left == slot
    assert prompt.size % prompts.ROWS == 0
    assert 0 <= prompt.size - prompt.left - prompt.rows < prompts.ROWS


def test_it_does_not_pay_where_most_of_the_square_is_padding() -> None:
    assert CausalPrompt(0, 1024, 0).pays
    assert CausalPrompt(0, 2048, 30 * 2048).pays
    assert not CausalPrompt(0, 1025, 0).pays
    assert not CausalPrompt(0, 1024, 2040).pays


@pytest.mark.skipif(DEVICE == "cuda", reason="cuDNN is there")
def test_without_cudnn_our_kernel_computes_prompts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompts, "LEAST", 8)
    monkeypatch.setattr(prompts, "ROWS", 8)
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "heads": 2, "kv_heads": 1}

    async def look(engine: hw.Engine) -> np.ndarray:
        async with engine.context() as ctx:
            forward = ctx.forward().input(list(range(16)))
            handle = forward.probe(-1, hw.Hidden(2))  # what looks inside is launched kernel by kernel
            return (await forward.execute()).hidden(handle)

    found, left = {}, True
    for mode in ("triton", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        with hw.Engine(random_model(**small), device="cpu", pages=8, threads=1) as engine:
            runner = engine._loop._runner  # type: ignore[attr-defined]
            if mode == "triton":
                runner.model.takes_prompts = True  # type: ignore[attr-defined]
            with caplog.at_level("INFO", logger="headway"):
                found[mode] = engine.run(look)
            if mode == "triton":
                left = runner.model.takes_prompts  # type: ignore[attr-defined]
    assert not left
    assert "cuDNN cannot compute attention" in caplog.text
    assert np.abs(found["triton"] - found["off"]).max() < 1e-4


def batch(*segments: Segment, written: int | None = None) -> Batch:
    rows = sum(len(s.rows) for s in segments)
    numbers, some = np.arange(rows), np.arange(rows if written is None else written)
    return Batch(numbers, numbers, some, some, segments)


def segment(first: int, rows: int, slot: int = 0, gone: int | None = None, mask: Brle | None = None) -> Segment:
    numbers = np.array([n for n in range(-(-(slot + rows) // PAGE)) if n != gone])
    return Segment(
        rows=range(first, first + rows),
        slots=np.arange(slot, slot + rows),
        pages=numbers + 1,
        numbers=numbers,
        masks=(mask,) + (None,) * (rows - 1),
        slot_positions=NO_POSITIONS,
        readouts=(),
        keep_last=False,
        kept=None,
        before_position=slot - 1,
    )


def test_long_plain_segments_are_prompts() -> None:
    found = find_prompts(batch(segment(0, 10), segment(10, 2048), segment(2058, 2048, slot=4096)))
    assert found == [CausalPrompt(10, 2048, 0), CausalPrompt(2058, 2048, 4096)]


def test_masks_discarded_pages_and_slots_that_are_not_written_are_left_to_the_other_kernel() -> None:
    assert find_prompts(batch(segment(0, 2048, mask=Brle.ones(1)))) == []
    assert find_prompts(batch(segment(0, 2048, slot=2048, gone=3))) == []
    assert find_prompts(batch(segment(0, 2048), written=2047)) == []
    assert find_prompts(batch(segment(0, 1000))) == []
