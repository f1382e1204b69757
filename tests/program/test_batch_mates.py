"""The law of batch mates: a pass gives the same result alone and in any batch, whatever its neighbors ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import headway as hw
from headway import Mask
from headway.program.engine import Engine
from headway.testing import random_model
from support import world as w
from support.checks import assert_close, random_tokens
from support.mates import PAGE, SUBJECTS, V, check_same, read, run
from support.sweeps import swept
from support.world import Twin

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=swept(FAMILIES, 2))
def engine(request: pytest.FixtureRequest) -> Iterator[hw.Engine]:
    with hw.Engine(
        random_model(request.param, vocab_size=V), threads=1, pages=400, page_size=PAGE, step_ms=60_000
    ) as made:
        yield made


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_pass_gives_the_same_alone_and_in_any_batch(engine: hw.Engine, name: str) -> None:
    subject, rng = SUBJECTS[name], np.random.default_rng(list(SUBJECTS).index(name))
    ((alone, handles),) = run(engine, [(subject, 0)])
    assert alone.stats.batch_size == 1
    for others in (1, 4, 16):
        names = rng.choice(list(SUBJECTS), size=others)
        crowd = [(SUBJECTS[str(n)], int(rng.integers(1, 1000))) for n in names]
        at = int(rng.integers(len(crowd) + 1))
        crowd.insert(at, (subject, 0))
        out, again = run(engine, crowd)[at]
        assert out.stats.batch_size == len(crowd)
        assert out.stats.pages_trimmed == alone.stats.pages_trimmed
        for one, other in zip(handles, again, strict=True):
            check_same(read(alone, one), read(out, other))


def test_all_of_them_at_once_equal_each_alone(engine: hw.Engine) -> None:
    crowd = [(work, i) for i, work in enumerate(SUBJECTS.values())]
    together = run(engine, crowd)
    assert {out.stats.batch_size for out, _ in together} == {len(crowd)}
    for (out, handles), mate in zip(together, crowd, strict=True):
        ((alone, again),) = run(engine, [mate])
        for one, other in zip(handles, again, strict=True):
            check_same(read(out, one), read(alone, other))


@pytest.mark.parametrize("budget", [1, 2, 7, 33])
def test_chunks_of_a_pass_do_not_change_it(engine: hw.Engine, budget: int) -> None:
    """A small budget cuts prompts into chunks that share steps with others; passes that see ahead run whole."""
    crowd = [(work, i) for i, work in enumerate(SUBJECTS.values())]
    whole = run(engine, crowd)
    with hw.Engine(
        engine.decoder, threads=1, pages=400, page_size=PAGE, max_batch_tokens=budget, step_ms=60_000
    ) as cut:
        parts = run(cut, crowd)
    assert max(out.stats.steps for out, _ in parts) > 22 // budget
    for (one, handles), (other, again) in zip(whole, parts, strict=True):
        for a, b in zip(handles, again, strict=True):
            check_same(read(one, a), read(other, b))


def test_a_mate_that_is_refused_disturbs_nobody(engine: hw.Engine) -> None:
    with engine.context() as context, engine.context() as other:
        forward = context.forward().input([1, 2, 3])
        handle = forward.probe(-1, hw.Logits())
        with engine._lock:
            running = forward.execute()
            with pytest.raises(hw.InvalidMask):
                other.forward().input([1]).attention_mask([[9]]).execute()
        found = running.result().logits(handle)
    with engine.context() as context:
        forward = context.forward().input([1, 2, 3])
        handle = forward.probe(-1, hw.Logits())
        assert_close(forward.execute().result().logits(handle), found)


# -- programs that share steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("forks", [2, 8, 32])
def test_gathered_forks_run_in_one_batch(engine: hw.Engine, forks: int) -> None:
    """All that have come while the worker was busy."""
    busy, all_there = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert all_there.wait(60)

    async def branch(context: hw.Context, token: int) -> tuple[int, np.ndarray]:
        forward = context.forward().input([token])
        handle = forward.probe(-1, hw.Logits())
        out = await forward.execute()
        return out.stats.batch_size, out.logits(handle)

    async def program(engine: hw.Engine) -> int:
        async with engine.context() as context:
            context.fill(random_tokens(V, 20))
            await context.flush()
            branches = [context.fork() for _ in range(forks)]
            holding = asyncio.ensure_future(asyncio.to_thread(engine._loop.call, hold))
            await asyncio.to_thread(busy.wait)
            running = [asyncio.ensure_future(branch(c, i)) for i, c in enumerate(branches)]
            await asyncio.sleep(0)  # each has begun
            all_there.set()
            found = await asyncio.gather(*running)
            await holding
            for i in (0, forks - 1):
                with context.fork() as alone:
                    _, logits = await branch(alone, i)
                    assert_close(found[i][1], logits)
            for c in branches:
                c.release()
            return min(size for size, _ in found)

    assert engine.run(program) == forks
    assert engine.stats().pages_held == 0


def test_a_storm_of_programs_against_the_oracle() -> None:
    """Many programs with masks, forks and cuts of their own, on one event loop; every logit is judged."""
    folder, judge = w.model("qwen2-layer-types")

    async def wander(engine: hw.Engine, seed: int) -> int:
        rng = np.random.default_rng(seed)
        twin, passes = Twin(engine.context(), judge), 0
        for _ in range(8):
            tokens = random_tokens(V, int(rng.integers(1, 12)), int(rng.integers(99)))
            n = int(rng.integers(1, 20))
            choice = w.Choice(Mask.sink(2, n), sees=w.sink(2, n)) if rng.random() < 0.5 else None
            plan, forward = twin.plan(tokens, mask=choice), twin.build(tokens, mask=choice)
            handle = forward.probe(-1, hw.Logits())
            out = await forward.execute()
            assert_close(out.logits(handle), judge.logits(plan.cells[-1:])[0])
            twin.world.advance(plan)
            passes += out.stats.batch_size > 1
            if rng.random() < 0.3:
                cut = int(rng.integers(len(twin.world.cells)))
                twin.context.truncate(cut)
                twin.world.truncate(cut)
            if rng.random() < 0.3:
                old, twin = twin, twin.fork()
                old.context.release()
        twin.context.release()
        return passes

    async def program(engine: hw.Engine) -> None:
        shared = await asyncio.gather(*(wander(engine, seed) for seed in range(12)))
        if isinstance(engine, Engine):  # elsewhere messages come one by one
            assert sum(shared) > 0  # some shared a step; how many depends on the machine

    with hw.Engine(folder, threads=1, pages=200, page_size=PAGE, step_ms=60_000) as engine:
        engine.run(program)
