"""Thousands of short programs, one in five cancelled at a random await: nothing is left behind, and memory stays."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import headway as hw
from headway.testing import random_model, scripted_engine
from support.scripted import check_pages, continued, numbers

STATM = Path("/proc/self/statm")
AT_ONCE = 32
Program = Callable[[hw.Engine, random.Random], Awaitable[None]]


def resident() -> int:
    """Bytes of memory this process has now."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


PROMPTS = [numbers(n, n) for n in (1, 9, 16, 17, 33, 50)]


async def talk(engine: hw.Engine, rng: random.Random) -> None:
    """A prompt, some tokens, and now and then a fork, a cut, a saved context or one that is just forgotten."""
    prompt, count = rng.choice(PROMPTS), rng.randrange(1, 8)
    context = engine.context(priority=rng.randrange(-2, 3))
    context.fill(prompt)
    found = await context.generate(hw.Argmax(), max_tokens=count).tokens()
    await check(engine, prompt, found)
    match rng.randrange(6):
        case 0:
            fork = context.fork()
            await check(engine, [*prompt, *found], await fork.generate(hw.Argmax(), max_tokens=2).tokens())
        case 1:
            context.truncate(rng.randrange(len(prompt)))
            await context.generate(hw.Multinomial(seed=1), max_tokens=2).tokens()
        case 2:
            context.save("kept")
            opened = engine.open("kept")
            assert opened is None or len(opened.tokens) > 0
        case 3:
            async with asyncio.timeout(5):
                await context.forward().input([1, 2]).execute()
        case _:
            pass
    if rng.random() < 0.5:
        context.release()


async def check(engine: hw.Engine, prompt: list[int], found: list[int]) -> None:
    if engine.config.layers == 1:  # the scripted model
        assert found == continued(prompt, len(found))


async def soak(engine: hw.Engine, programs: int, seed: int) -> int:
    """Run many, some at a time; returns how many were cancelled."""
    rng, left, cancelled = random.Random(seed), programs, 0

    async def lane() -> None:
        nonlocal left, cancelled
        while left > 0:
            left -= 1
            number = left
            task = asyncio.create_task(talk(engine, random.Random(seed * 1_000_003 + number)))
            if number % 5 == 0:
                for _ in range(rng.randrange(40)):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1

    await asyncio.gather(*(lane() for _ in range(AT_ONCE)))
    return cancelled


def run(engine: hw.Engine, programs: int, seed: int) -> None:
    """Programs, and then nothing of them: every page is free or cached again."""
    assert engine.run(soak, programs, seed) > 0
    engine.delete("kept")
    gc.collect()
    engine._loop.call(lambda: None)
    stats = engine.stats()
    assert (stats.pages_held, stats.queued) == (0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    check_pages(engine)
    engine.cache.clear()
    assert engine.stats().pages_free == stats.pages_total
    assert engine._loop.kv_cache.computing == {}
    assert all(table.closed for table in engine._loop.kv_cache.tables)
    assert len(engine._loop.kv_cache.tables) <= AT_ONCE  # the last step's


def test_some_hundred_programs_leave_nothing() -> None:
    with scripted_engine(pages=60, max_batch_tokens=64) as engine:
        run(engine, 400, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(("kind", "first", "rest"), [("scripted", 1000, 9000), ("random", 500, 3000)])
def test_soak(kind: str, first: int, rest: int) -> None:
    if kind == "scripted":
        made = scripted_engine(pages=60, max_batch_tokens=64)
    else:
        made = hw.Engine(random_model(layers=2), pages=60, threads=1, max_batch_tokens=64)
    with made as engine:
        run(engine, first, 1)
        before = resident()
        run(engine, rest, 2)
        after = resident()
        assert after <= before * 1.05, f"{before / 2**20:.1f} MiB became {after / 2**20:.1f} MiB"
