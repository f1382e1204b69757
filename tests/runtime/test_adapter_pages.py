"""Pages computed under adapters: preempted, saved, opened again, recomputed, bit for bit in deterministic mode."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.runtime.passes import Pass
from headway.testing import random_adapter, random_model
from support.checks import assert_close, random_tokens

V, PAGE = 97, 8
MODEL = random_model("llama", layers=2)
ONE, TWO = (random_adapter(MODEL.config, rank=rank, seed=rank) for rank in (3, 20))
PARTS: list[tuple[int, list[tuple[hw.Adapter, float]]]] = [
    (11, [(ONE, 1.0)]),
    (9, []),
    (7, [(TWO, 0.5), (ONE, 0.5)]),
    (12, [(TWO, -0.25)]),
]


@pytest.fixture(autouse=True, params=["native", "torch"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    if request.param == "torch":
        monkeypatch.setenv("HEADWAY_NATIVE", "off")
    return request.param


def opened(pages: int = 64, **options: Any) -> hw.Engine:
    return hw.Engine(MODEL, threads=1, pages=pages, page_size=options.pop("page_size", PAGE), **options)


@pytest.fixture
def engine() -> Iterator[hw.Engine]:
    with opened() as made:
        yield made


def written(context: hw.Context) -> hw.Context:
    """A context whose parts were computed under different adapters."""
    for i, (count, uses) in enumerate(PARTS):
        forward = context.forward().input(random_tokens(V, count, i))
        for adapter, scale in uses:
            forward.adapter(adapter, scale)
        forward.execute().result()
    return context


def read(context: hw.Context) -> np.ndarray:
    """The logits after one more token under an adapter, which attends to every slot."""
    fork = context.fork()
    forward = fork.forward().input([5]).adapter(TWO)
    handle = forward.probe(-1, hw.Logits())
    found = forward.execute().result().logits(handle)
    fork.release()
    return found


def test_a_preempted_context_is_computed_again_under_the_adapters_of_its_log(engine: hw.Engine) -> None:
    with written(engine.context()) as context:
        before = read(context)
        with engine._lock:
            engine._loop.kv_cache.preempt(context._table, engine._loop._queue)
        engine.cache.clear()
        assert context._table.is_preempted
        assert_close(read(context), before)


def test_slots_that_move_keep_their_adapters(engine: hw.Engine) -> None:
    with written(engine.context()) as context, engine.context() as other:
        other.inner().append_from(context, [1, 2])
        context.inner().keep_slots([*range(30), 33, 38])
        for one in (other, context):
            before, uses = read(one), [0 if mix is None else len(mix.uses) for mix in one._table.adapters]
            assert uses == ([1] * 3 + [0] * 9 + [2] * 4 if one is other else [1] * 11 + [0] * 9 + [2] * 7 + [1] * 5)
            with engine._lock:
                engine._loop.kv_cache.preempt(one._table, engine._loop._queue)
            engine.cache.clear()
            assert_close(read(one), before)


def test_preempted_generations_under_adapters_give_the_same_tokens() -> None:
    async def program(engine: hw.Engine) -> list[list[int]]:
        contexts = [engine.context().fill(random_tokens(V, 20, i)) for i in range(6)]
        mixes = [PARTS[i % len(PARTS)][1] for i in range(6)]
        found = await asyncio.gather(
            *(c.generate(hw.Argmax(), max_tokens=24, adapter=mix).tokens() for c, mix in zip(contexts, mixes))
        )
        for context in contexts:
            context.release()
        return found

    with opened() as roomy, opened(pages=14) as tight:
        expected, found = roomy.run(program), tight.run(program)
        assert tight.stats().preemptions > 0
    assert found == expected


def test_adapters_of_a_preempted_context_stay_alive(engine: hw.Engine) -> None:
    adapter = random_adapter(MODEL.config, rank=2, seed=70)
    context = engine.context()
    context.forward().input(random_tokens(V, 20, 1)).adapter(adapter).execute().result()
    before = read(context)
    engine.unload_adapter(adapter)
    del adapter
    with engine._lock:
        engine._loop.kv_cache.preempt(context._table, engine._loop._queue)
    engine.cache.clear()
    gc.collect()
    assert_close(read(context), before)
    context.release()


@pytest.mark.parametrize("durable", [False, True])
def test_a_snapshot_is_opened_under_the_same_adapters(engine: hw.Engine, durable: bool) -> None:
    with written(engine.context()) as context:
        before = read(context)
        context.save("it", durable=durable)
    found = engine.open("it")
    assert found is not None
    assert_close(read(found), before)
    mixes = [mix and [(a.digest, scale) for a, scale in mix.uses] for mix in found._table.adapters]
    assert [len(mix or ()) for mix in mixes] == [n for count, uses in PARTS for n in [len(uses)] * count]
    found.release()
    engine.delete("it")


@pytest.mark.parametrize("page_size", [PAGE, 16])
def test_a_durable_snapshot_needs_its_adapters_loaded(page_size: int) -> None:
    """Opened with another page size it is computed again, under the same adapters."""
    with opened() as first, written(first.context()) as context:
        before = read(context)
        context.save("it", durable=True)
    with opened(page_size=page_size) as second:
        with pytest.raises(hw.SnapshotError, match="load_adapter"):
            second.open("it")
        second.load_adapter(ONE)
        with pytest.raises(hw.SnapshotError, match="load_adapter"):
            second.open("it")
        assert second.stats().pages_held == 0
        second.load_adapter(TWO)
        found = second.open("it")
        assert found is not None
        assert_close(read(found), before)
        found.release()


def test_deterministic_rows_depend_on_their_own_adapters_alone(runner: str) -> None:
    """Bit for bit alone, in a crowd of other adapters, chunk by chunk, from the cache and computed again."""
    tokens = random_tokens(V, 37, 9)

    def logits(engine: hw.Engine, mates: int) -> bytes:
        contexts = [engine.context() for _ in range(1 + mates)]
        forwards = [contexts[0].forward().input(tokens).adapter(TWO, 0.5).adapter(ONE)]
        for i, context in enumerate(contexts[1:]):
            forward = context.forward().input(random_tokens(V, 1 + 5 * i, i))
            forwards.append(forward.adapter((ONE, TWO)[i % 2], 0.1 * i) if i % 3 else forward)
        handles = [forwards[0].probe(row, hw.Logits()) for row in (-1, -2, 3)]
        with engine._lock:
            running = [forward.execute() for forward in forwards]
        out = running[0].result()
        for execution in running:
            execution.result()
        found = b"".join(out.logits(handle).tobytes() for handle in handles)
        for context in contexts:
            context.release()
        return found

    with opened(deterministic=True) as engine, opened(deterministic=True, max_batch_tokens=5) as chunked:
        alone = logits(engine, 0)
        engine.cache.clear()
        assert logits(engine, 7) == alone
        assert logits(engine, 3) == alone  # with pages from the cache
        assert logits(chunked, 2) == alone


def test_a_pass_by_hand_may_not_name_another_engines_adapter(engine: hw.Engine) -> None:
    with opened() as other, other.context() as context:
        forward = context.forward().input([1]).adapter(ONE)
        mix = forward._build(context, context._view(None)).adapters
    with engine.context() as context, pytest.raises(hw.InvalidInput, match="has not loaded"):
        context.execute(Pass((1,), (0,), adapters=mix))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_in_a_tight_pool_give_what_each_gives_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes, generations, forks, cuts and snapshots under random mixes: preempted, cached and batched, or alone."""
    third = random_adapter(MODEL.config, rank=1, seed=80, roles=("v", "down"))

    async def one(engine: hw.Engine, number: int) -> list[Any]:
        rng = np.random.default_rng([seed, number])
        context, found = engine.context(), list[Any]()
        for step in range(8):
            mix = [(a, float(rng.choice([0.5, 1.0, -1.0]))) for a in (ONE, TWO, third) if rng.random() < 0.4]
            match int(rng.integers(6)):
                case 0:
                    context.truncate(int(rng.integers(min(9, len(context.tokens) + 1))))
                case 1:
                    context.fork().release()
                    context.save(f"{number}")
                    other = engine.take(f"{number}")
                    assert other is not None
                    context.release()
                    context = other
                case 2:
                    context.fill(random_tokens(V, 3, step))
                    found.append(await context.generate(hw.Argmax(), max_tokens=7, adapter=mix).tokens())
                case 3:
                    await context.fill(random_tokens(V, int(rng.integers(1, 20)), step % 3)).flush(adapter=mix)
                case _:
                    forward = context.forward().input(random_tokens(V, int(rng.integers(1, 12)), step % 3))
                    for adapter, scale in mix:
                        forward.adapter(adapter, scale)
                    handle = forward.probe(-1, hw.Logits())
                    found.append((await forward.execute()).logits(handle))
            await asyncio.sleep(0)
        context.release()
        return found

    async def together(engine: hw.Engine) -> list[list[Any]]:
        return list(await asyncio.gather(*(one(engine, i) for i in range(9))))

    with opened(pages=21, max_batch_tokens=32) as tight:
        crowd = tight.run(together)
        assert tight.stats().pages_held == 0
        assert tight.stats().preemptions > 0
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with opened(pages=400) as roomy:
        roomy._loop.kv_cache.caching = False
        for i, expected in enumerate(crowd):
            alone = roomy.run(one, i)
            assert len(alone) == len(expected)
            for a, b in zip(alone, expected, strict=True):
                assert a == b if isinstance(a, list) else np.abs(a - b).max() <= 1e-3 * max(1.0, np.abs(a).max())
