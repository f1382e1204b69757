"""Adapters in programs: what a row is computed under, whatever shares its step, its pages or its cache."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.models.decoder import Decoder
from headway.runtime.batch import Batch
from headway.testing import random_adapter, random_model
from support.checks import assert_close, random_tokens
from support.eventually import eventually
from support.merged import merged
from support.watched import WatchedRunner

V, PAGE = 97, 8
PROMPT = random_tokens(V, 21, 3)
MODEL = random_model("qwen3", layers=3)
ADAPTERS = [random_adapter(MODEL.config, rank=rank, seed=rank, head=rank == 4) for rank in (1, 4, 17)]
Uses = list[tuple[hw.Adapter, float]]
MIXES: list[Uses] = [
    [],
    [(ADAPTERS[0], 1.0)],
    [(ADAPTERS[1], 0.5)],
    [(ADAPTERS[2], -0.7)],
    [(ADAPTERS[0], 0.25), (ADAPTERS[2], 0.5)],
    [(ADAPTERS[2], 0.3), (ADAPTERS[1], 0.2), (ADAPTERS[0], 1.5)],
]


@pytest.fixture(params=["native", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Engine]:
    if request.param == "torch":
        monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with hw.Engine(MODEL, threads=2, pages=200, page_size=PAGE) as made:
        yield made


class DecodeCounter(WatchedRunner):
    """Counts the decode rows under adapters."""

    adapted = 0

    def before(self, batch: Batch) -> None:
        if batch.decode is not None and batch.decode.adapters is not None:
            self.adapted += sum(mix is not None for mix in batch.decode.adapters)


def of(uses: Uses) -> Decoder:
    return merged(MODEL, *uses)


def build(context: hw.Context, tokens: list[int], uses: Uses) -> tuple[hw.Forward, Any]:
    forward = context.forward().input(tokens)
    for adapter, scale in uses:
        forward.adapter(adapter, scale)
    return forward, forward.probe(-1, hw.Logits())


def last_logits(engine: hw.Engine, tokens: list[int], uses: Uses) -> np.ndarray:
    with engine.context() as context:
        forward, handle = build(context, tokens, uses)
        return forward.execute().result().logits(handle)


def expected(tokens: list[int], uses: Uses) -> np.ndarray:
    with hw.Engine(of(uses), threads=1, pages=64) as dense:
        return last_logits(dense, tokens, [])


def test_adapters_add_up_with_their_scales(engine: hw.Engine) -> None:
    for uses in MIXES:
        assert_close(last_logits(engine, PROMPT, uses), expected(PROMPT, uses))


def test_any_mix_of_adapters_shares_a_step(engine: hw.Engine) -> None:
    """Each row in a crowd of all mixes, prompts and single rows together, is what its merged model gives."""
    contexts = [engine.context() for _ in range(2 * len(MIXES))]
    passes = []
    for i, context in enumerate(contexts):
        uses, tokens = MIXES[i % len(MIXES)], PROMPT[: 1 + 9 * (i % 3)]
        passes.append((tokens, uses, *build(context, tokens, uses)))
    with engine._lock:
        running = [forward.execute() for _, _, forward, _ in passes]
    outs = [execution.result() for execution in running]
    assert max(out.stats.batch_size for out in outs) > 6
    for out, (tokens, uses, _, handle) in zip(outs, passes, strict=True):
        assert_close(out.logits(handle), expected(tokens, uses))
    for context in contexts:
        context.release()


def test_generations_under_different_adapters_run_ahead_together(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> list[list[int]]:
        contexts = [engine.context().fill(PROMPT) for _ in MIXES]
        found = await asyncio.gather(
            *(c.generate(hw.Argmax(), max_tokens=20, adapter=uses).tokens() for c, uses in zip(contexts, MIXES))
        )
        for context in contexts:
            context.release()
        return found

    runner = DecodeCounter(engine)
    together = engine.run(program)
    assert runner.adapted > 10 * len(MIXES[1:])  # rows that no program asked for one by one

    async def alone(dense: hw.Engine) -> list[int]:
        async with dense.context() as context:
            return await context.fill(PROMPT).generate(hw.Argmax(), max_tokens=20).tokens()

    for tokens, uses in zip(together, MIXES, strict=True):
        with hw.Engine(of(uses), threads=1, pages=64) as dense:
            assert tokens == dense.run(alone)


def test_pages_are_shared_only_under_the_same_weights_and_scales(engine: hw.Engine) -> None:
    def hits(uses: Uses) -> int:
        with engine.context() as context:
            forward, _ = build(context, PROMPT, uses)
            return forward.execute().result().stats.cache_hits

    one, other = ADAPTERS[:2]
    twin = random_adapter(MODEL.config, rank=1, seed=1)  # the same weights, another object
    assert [hits([]), hits([])] == [0, 2]
    assert [hits([(one, 1.0)]), hits([(one, 1.0)]), hits([(twin, 1.0)])] == [0, 2, 2]
    assert hits([(one, 0.5)]) == hits([(other, 1.0)]) == hits([(one, 1.0), (other, 1.0)]) == 0
    assert hits([(other, 1.0), (one, 1.0)]) == 2  # their sum has no order
    assert hits([(one, 0.0)]) == 2  # a scale of 0 is no adapter
    assert hits([(one, 0.25), (one, 0.25)]) == 2  # as 0.5 above


def test_the_last_token_is_read_again_under_the_adapters_of_its_slot(engine: hw.Engine) -> None:
    uses = MIXES[4]
    with engine.context() as context:
        build(context, [*PROMPT, 5], uses)[0].execute().result()
        context.truncate(1)  # its state is not kept: the token before is computed again
        for own in ([], [(ADAPTERS[1], 1.0)]):  # a pass's adapters are for its own rows
            forward = context.forward()
            for adapter, scale in own:
                forward.adapter(adapter, scale)
            handle = forward.probe(-1, hw.Logits())
            assert_close(forward.execute().result().logits(handle), expected(PROMPT, uses))


def test_slots_stay_what_they_were_computed_under(engine: hw.Engine) -> None:
    with engine.context() as context:
        build(context, PROMPT, MIXES[1])[0].execute().result()
        fork = context.fork()
        found = []
        for uses, one in ((MIXES[2], context), (MIXES[3], fork)):
            forward, handle = build(one, [7, 8, 9], uses)
            found.append(forward.execute().result().logits(handle))
        assert np.abs(found[0] - found[1]).max() > 0.05
        context.truncate(3)
        forward, handle = build(context, [7, 8, 9], MIXES[3])
        assert_close(forward.execute().result().logits(handle), found[1])
        fork.release()


def test_pending_tokens_are_computed_under_the_adapters_of_the_pass(engine: hw.Engine) -> None:
    with engine.context() as context:
        forward = context.fill(PROMPT[:-1]).forward().input(PROMPT[-1:]).adapter(ADAPTERS[1], 0.5)
        handle = forward.probe(-1, hw.Logits())
        assert_close(forward.execute().result().logits(handle), expected(PROMPT, MIXES[2]))

    async def flushed(engine: hw.Engine) -> np.ndarray:
        async with engine.context() as context:
            await context.fill(PROMPT).flush(adapter=(ADAPTERS[1], 0.5))
            forward = context.forward()
            handle = forward.probe(-1, hw.Logits())
            return (await forward.execute()).logits(handle)

    assert_close(engine.run(flushed), expected(PROMPT, MIXES[2]))


def test_memory_is_counted_and_freed_when_nobody_needs_it(engine: hw.Engine) -> None:
    adapter = random_adapter(MODEL.config, rank=3, seed=50)
    assert engine.stats().adapters == 0
    engine.load_adapter(adapter)
    engine.load_adapter(random_adapter(MODEL.config, rank=3, seed=50))  # the same weights: loaded once
    figures = engine.stats()
    assert figures.adapters == 1
    assert figures.adapter_bytes >= adapter.nbytes
    context = engine.context()
    build(context, PROMPT, [(adapter, 1.0)])[0].execute().result()
    engine.unload_adapter(adapter)
    with pytest.raises(hw.InvalidInput, match="not loaded"):
        engine.unload_adapter(adapter)
    gc.collect()
    assert engine.stats().adapters == 1  # the context's slots were computed under it
    context.release()
    assert _adapters_left(engine) == (0, 0)
    again = last_logits(engine, PROMPT, [(adapter, 1.0)])
    assert_close(again, expected(PROMPT, [(adapter, 1.0)]))
    assert engine.stats().adapters == 1

    async def generate(engine: hw.Engine, adapter: hw.Adapter) -> None:
        async with engine.context().fill(PROMPT) as context:
            await context.generate(hw.Argmax(), max_tokens=4, adapter=adapter).tokens()

    engine.run(generate, adapter)
    engine.unload_adapter(adapter)
    assert _adapters_left(engine) == (0, 0)


def _adapters_left(engine: hw.Engine) -> tuple[int, int]:
    """Adapters and their bytes, once the worker is idle: it needs no other pass to let go of them."""
    eventually(lambda: gc.collect() >= 0 and engine.stats().adapters == 0)
    return engine.stats().adapters, engine.stats().adapter_bytes


def test_unloading_during_a_generation_changes_nothing(engine: hw.Engine) -> None:
    adapter = random_adapter(MODEL.config, rank=2, seed=60)

    async def program(engine: hw.Engine, unload: bool) -> list[int]:
        async with engine.context() as context:
            tokens: list[int] = []
            async for step in context.fill(PROMPT).generate(hw.Argmax(), max_tokens=16, adapter=adapter):
                tokens += step.tokens
                if unload and len(tokens) == 5:
                    engine.unload_adapter(adapter)
            return tokens

    assert engine.run(program, True) == engine.run(program, False)


def test_beams_and_several_sequences_go_under_an_adapter(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine, uses: Uses) -> list[list[int]]:
        async with engine.context(seed=4) as context:
            context.fill(PROMPT)
            beams = await context.fork().generate(num_beams=3, max_tokens=6, adapter=uses).sequences()
            drawing = context.generate(hw.Multinomial(seed=2), num_return_sequences=2, max_tokens=6, adapter=uses)
            return [list(one.tokens) for one in (*beams, *await drawing.sequences())]

    found = engine.run(program, MIXES[4])
    with hw.Engine(of(MIXES[4]), threads=1, pages=200) as dense:
        assert found == dense.run(program, [])


def test_speculation_under_an_adapter_gives_the_same_tokens(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine, drafter: hw.Drafter | None) -> list[int]:
        async with engine.context() as context:
            context.fill([*PROMPT, *PROMPT, *PROMPT[:5]])
            generation = context.generate(hw.Argmax(), max_tokens=24, adapter=MIXES[4], speculate=drafter)
            return await generation.tokens()

    assert engine.run(program, hw.PromptLookup()) == engine.run(program, None)


def test_models_draft_under_adapters(engine: hw.Engine) -> None:
    """The model's own layers under those of the generation, as in the merged model; a draft model under its own."""

    async def program(engine: hw.Engine, drafter: hw.Drafter, uses: Uses) -> tuple[list[int], hw.SpeculationStats]:
        async with engine.context().fill(PROMPT) as context:
            generation = context.generate(hw.Multinomial(seed=2), max_tokens=24, adapter=uses, speculate=drafter)
            tokens = await generation.tokens()
            assert generation.speculation is not None
            return tokens, generation.speculation

    own = hw.OwnLayers(2, adaptive=False)
    for uses in MIXES[2:5]:
        with hw.Engine(of(uses), threads=1, pages=64, page_size=PAGE) as dense:
            assert engine.run(program, own, uses) == dense.run(program, own, [])
    pairs = random_adapter(MODEL.config, seed=9, roles=("o",)).pairs
    beyond = hw.Adapter({target: pair for target, pair in pairs.items() if target.layer == 2})
    assert engine.run(program, own, [(beyond, 1.0)])[0]  # it changes no layer that drafts
    uses = MIXES[4]
    _, agreeing = engine.run(program, hw.DraftModel(engine, adapter=uses, adaptive=False), uses)
    _, other = engine.run(program, hw.DraftModel(engine, adaptive=False), uses)
    assert agreeing.acceptance == 1.0 > other.acceptance


NOT_ADAPTERS = ["x", 3, (ADAPTERS[0], "1"), [ADAPTERS[0], 2], (ADAPTERS[0], float("nan")), (ADAPTERS[0], 1e9), {}]


@pytest.mark.parametrize("adapter", NOT_ADAPTERS)
def test_what_is_not_an_adapter_is_refused(engine: hw.Engine, adapter: Any) -> None:
    with engine.context() as context:
        context.fill(PROMPT)
        with pytest.raises((hw.WrongType, hw.InvalidInput)):
            context.generate(hw.Argmax(), adapter=adapter)
        assert context.pending == tuple(PROMPT)


def test_an_adapter_of_another_model_is_refused(engine: hw.Engine) -> None:
    other = random_adapter(random_model(hidden_size=32).config)
    deeper = random_adapter(random_model("qwen3", layers=4).config)
    for adapter, what in ((other, "matrix is"), (deeper, "has 3 layers")):
        with engine.context() as context, pytest.raises(hw.BadModelFile, match=what):
            context.forward().adapter(adapter)
    assert engine.stats().adapters == 0
