"""Memory on a CPU: how much the pool takes by default, an amount that was asked for, and what goes back when idle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import headway as hw
from headway.kv import host_memory
from headway.kv.allocator import Allocator
from headway.program.kv_cache import idle
from headway.runtime import loop
from headway.runtime.memory import MemoryBudget, Wish, memory_share, pick_pages, read_memory, reason
from headway.testing import random_model
from support.checks import logit_rows, random_tokens
from support.eventually import eventually

GIB = 1 << 30
CPU = torch.device("cpu")


def resident(data: np.ndarray) -> int:
    """Bytes of an array that take memory, by the kernel's own count."""
    start, found, here = data.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            here = low <= start < high
        elif here and first == "Rss:":
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.parametrize(
    ("wish", "free", "pages", "why"),
    [
        (Wish(1 << 20, 100_000, 4, one=100), 20, 3 * 1024, "an eighth of the 24.0 GiB"),
        (Wish(1 << 20, 1000, 4, one=100), 20, 1000, "32 sequences of full length"),
        (Wish(1 << 20, 100_000, 4, one=5000), 20, 5000, "one sequence of full length"),
        (Wish(1 << 20, 100_000, 4, one=5000), 5, 2048, "40% of the 5.0 GiB that are free"),
    ],
)
def test_the_default_leaves_room_for_others_and_says_why(wish: Wish, free: int, pages: int, why: str) -> None:
    budget = MemoryBudget("cpu", 24 * GIB, free * GIB, None)
    assert pick_pages(None, wish, budget) == pages
    assert why in reason(pages, None, wish, budget)
    assert "asked for" in reason(7, 7, wish, budget)


def test_an_amount_is_bytes_or_text() -> None:
    total = read_memory(CPU).total
    for amount, size in ((1 << 30, GIB), ("1G", GIB), ("1 gib", GIB), ("1.5GB", 3 * GIB // 2), ("2048K", 2 << 20)):
        assert memory_share(amount, None, CPU) == pytest.approx(size / total)
    assert (memory_share(None, 0.3, CPU), memory_share(None, None, CPU)) == (0.3, None)
    for wrong in ("", "much", "-1G", "1X", "1e9", "١G", 0, True, 1.5, "9" * 15 + "T", total + 1):
        with pytest.raises(hw.HeadwayError, match=r"memory (is|must)"):
            memory_share(wrong, None, CPU)  # type: ignore[arg-type]
    with pytest.raises(hw.InvalidInput, match="give one of them"):
        memory_share("1G", 0.5, CPU)


def test_an_engine_stays_within_the_amount() -> None:
    with hw.Engine(random_model(max_positions=1 << 16), memory="16M", device="cpu", threads=1) as engine:
        assert engine.info.weight_bytes + engine.info.kv_bytes <= 16 << 20 < 2 * engine.info.kv_bytes + (8 << 20)
        assert "what weights leave" in engine.info.kv_reason


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident memory is read from /proc")
def test_memory_that_is_given_back_reads_as_zeros() -> None:
    memory = host_memory.lazy_zeros(1 << 26)
    data = np.frombuffer(memory, np.uint8)
    data[:] = 7
    before = resident(data)
    assert before >= 1 << 26
    host_memory.give_back(memory, 5000, 1 << 25)
    assert resident(data) <= before - (1 << 25) + (1 << 20)  # its neighbors may have grown
    edge = host_memory.SYSTEM_PAGE
    kept = -(-5000 // edge) * edge
    assert (data[:kept] == 7).all()
    assert not data[kept : 1 << 25].any()
    assert (data[1 << 25 :] == 7).all()
    host_memory.give_back(memory, 10, 20)  # less than a page of the system: nothing
    assert (data[:kept] == 7).all()


def test_runs_are_the_numbers() -> None:
    numbers = sorted(np.random.default_rng(0).choice(100, 60, replace=False).tolist())
    assert [n for a, b in host_memory.runs(numbers) for n in range(a, b)] == numbers
    assert list(host_memory.runs([])) == []


def test_shrinking_frees_cached_pages_oldest_first_and_nothing_that_is_held() -> None:
    pages = Allocator(10)
    held, old, new = pages.take(2), pages.take(2), pages.take(3)
    for page in (*held, *old, *new):
        pages.register(page, bytes([page]))
    pages.drop(old)
    pages.drop(new)
    pages.take_edits()
    assert pages.shrink(3, most=1) == sorted(old)[:1]
    assert pages.shrink(3, most=9) == sorted(old)[1:]
    assert pages.shrink(3, most=9) == []
    assert pages.cached == 3
    assert all(pages.holders(page) == 1 for page in held)
    pages.check([held])


def test_an_idle_engine_gives_cached_pages_back_and_holds_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(idle, "IDLE_CACHE", 0)
    monkeypatch.setattr(idle, "IDLE_SHARE", 1)  # a page at a time
    tokens = random_tokens(97, 100)
    with hw.Engine(random_model(vocab_size=97), pages=32, device="cpu", threads=1) as engine:
        with engine.context(salt="apart") as context:
            expected = logit_rows(context, [*tokens, 5])[-1]
        held = engine.context(salt="held")
        logit_rows(held, tokens)
        eventually(lambda: engine.stats().pages_cached == 0)
        assert (engine.stats().pages_cached, engine.stats().pages_held) == (0, 7)
        np.testing.assert_allclose(logit_rows(held, [5])[0], expected, atol=1e-4)
        with engine.context(salt="apart") as again:
            np.testing.assert_allclose(logit_rows(again, [*tokens, 5])[-1], expected, atol=1e-4)
        held.release()
