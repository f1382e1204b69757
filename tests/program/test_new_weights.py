"""New weights between two steps, engines that sleep, and log-probabilities that a trainer can use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import headway as hw
from headway.testing import scripted_engine
from support.checks import assert_close
from support.hf import save_hf, variant

V = 97
PROMPT = list(range(3, 40))
HOW = hw.Sampling(temperature=0.9, seed=5)


@pytest.fixture(scope="module", params=["qwen2-gqa-tied", "llama-biases", "qwen3-headdim24"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """Two models of one shape as folders, and the second for transformers."""
    both = [variant(request.param, seed)[1] for seed in range(2)]
    first, second = (save_hf(tmp_path_factory.mktemp("weights"), hf) for hf in both)
    return first, second, both[1]


def state(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def logits(engine: hw.Engine, context: hw.Context | None = None) -> np.ndarray:
    context = context or engine.context().fill(PROMPT)
    forward = context.forward().input([1])
    handle = forward.probe(-1, hw.Logits())
    return forward.execute().result().logits(handle)


@pytest.fixture(params=["auto", "off"])
def engines(request: pytest.FixtureRequest, models: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("HEADWAY_NATIVE", request.param)
    with hw.Engine(models[0], threads=1, pages=32) as ours, hw.Engine(models[1], threads=1, pages=32) as other:
        yield ours, other


def test_new_weights_are_those_of_the_other_model(engines: tuple[hw.Engine, hw.Engine], models: Any) -> None:
    ours, other = engines
    old, before = logits(ours), ours.fingerprint
    kept, again = ours.context().fill(PROMPT), ours.context().fill(PROMPT)
    for context in (kept, again):
        asyncio.run(context.flush())
    ours.update_weights(state(models[1]))
    assert_close(logits(ours), logits(other))
    assert_close(logits(ours, again), logits(other))  # computed again from its log
    assert np.abs(logits(ours) - old).max() > 0.1
    assert ours.fingerprint not in (before, other.fingerprint)
    one = ours.fingerprint
    some = {name: tensor for name, tensor in state(models[0]).items() if ".layers.1." in name or "embed" in name}
    mixed = {**state(models[1]), **some}
    ours.update_weights(some)
    assert ours.fingerprint != one
    expected = logits(ours)
    other.update_weights(mixed)
    assert_close(expected, logits(other))
    assert_close(logits(ours, kept), expected)
    kept.release()
    again.release()


def test_kept_contexts_have_their_old_slots_and_stay_out_of_the_cache(
    engines: tuple[hw.Engine, hw.Engine], models: Any
) -> None:
    ours, other = engines
    with ours.context() as kept:
        asyncio.run(kept.fill(PROMPT).flush())
        ours.update_weights(state(models[1]), contexts="keep")
        found = logits(ours, kept.fork())
        assert np.abs(found - logits(other)).max() > 1e-3  # the row is new, what it reads is old
        with ours._lock:
            ours._loop.kv_cache.preempt(kept._table, ours._loop._queue)
        assert_close(logits(ours, kept.fork()), found)
        assert ours.context().fill(PROMPT).forward().input([1]).execute().result().stats.cache_hits == 0
        assert_close(logits(ours), logits(other))


def test_a_generation_goes_on_under_new_weights(engines: tuple[hw.Engine, hw.Engine], models: Any) -> None:
    ours, other = engines

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as ctx:
            gen = ctx.fill(PROMPT).generate(HOW, max_tokens=12, stop_only=True)
            for _ in range(4):
                await anext(gen)
            before = ctx.tokens
            await asyncio.to_thread(engine.update_weights, state(models[1]))
            tokens = await gen.tokens()
        async with other.context() as ctx:
            rest = await ctx.fill(before).generate(HOW, max_tokens=8, stop_only=True).tokens()
        assert tokens[4:] == rest

    ours.run(program)


def test_what_is_wrong_changes_nothing(engines: tuple[hw.Engine, hw.Engine], models: Any) -> None:
    ours, _ = engines
    good, before, fingerprint = state(models[1]), logits(ours), ours.fingerprint
    name = "model.layers.0.self_attn.q_proj.weight"
    cases: list[tuple[Any, str]] = [
        ({**good, "model.layers.0.self_attn.q_porj.weight": good[name]}, "did you mean"),
        ({**good, name: good[name][:-1]}, "has shape"),
        ({**good, name: good[name] * float("nan")}, "not finite"),
        ({**good, name: good[name].long()}, "floats"),
        ({**good, name: "x"}, "floats"),
        ({**good, name: good[name].to("meta")}, "is on the meta device, without numbers"),
        ({**good, name: good[name].to_sparse()}, "is sparse_coo, not dense"),
        ([1], "mapping"),
    ]
    for tensors, says in cases:
        with pytest.raises(hw.HeadwayError, match=says):
            ours.update_weights(tensors)
    with pytest.raises(hw.InvalidInput, match="'recompute' or 'keep'"):
        ours.update_weights(good, contexts="drop")  # type: ignore[arg-type]
    if ours.config.tied:
        with pytest.raises(hw.InvalidInput, match="tied"):
            ours.update_weights({"lm_head.weight": good["model.embed_tokens.weight"]})
    with ours.context() as fixed:
        asyncio.run(fixed.fill(PROMPT).flush())
        fixed.inner().discard_pages(0, 1)
        with pytest.raises(hw.Unsupported, match="1 contexts"):
            ours.update_weights(good)
    assert ours.fingerprint == fingerprint
    assert np.array_equal(logits(ours), before)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_matrices_are_quantized_again(models: Any, quantize: str) -> None:
    with (
        hw.Engine(models[0], threads=1, pages=32, quantize=quantize) as ours,
        hw.Engine(models[1], threads=1, pages=32, quantize=quantize) as other,
    ):
        ours.update_weights({name: tensor.numpy() for name, tensor in state(models[1]).items()})
        assert np.array_equal(logits(ours), logits(other))


def test_a_runner_that_was_given_has_no_weights_to_change() -> None:
    with scripted_engine(pages=4) as engine:
        for act in (lambda: engine.update_weights({}), engine.sleep):
            with pytest.raises(hw.Unsupported, match="was given another"):
                act()


# -- sleeping ----------------------------------------------------------------------------------------------------------


def test_contexts_come_back_after_a_sleep(engines: tuple[hw.Engine, hw.Engine], models: Any) -> None:
    ours, other = engines

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as ctx, engine.context() as fixed:
            expected = await ctx.fork().fill(PROMPT).generate(HOW, max_tokens=10, stop_only=True).tokens()
            await fixed.fill(PROMPT).flush()
            fixed.inner().discard_pages(0, 1)
            wanted = logits(engine, fixed.fork())
            gen = ctx.fill(PROMPT).generate(HOW, max_tokens=10, stop_only=True)
            for _ in range(3):
                await anext(gen)
            ctx.save("kept")
            for _ in range(2):
                await asyncio.to_thread(engine.sleep)
            assert engine.is_asleep
            assert engine._pool is None
            assert engine.stats().pages_held == 0
            with pytest.raises(hw.Closed, match="sleeps"):
                engine.context().fill([1]).forward().execute()
            with pytest.raises(hw.Closed, match="sleeps"):
                fixed.save("it", durable=True)
            fork = ctx.fork()
            for _ in range(2):
                await asyncio.to_thread(engine.wake)
            assert not engine.is_asleep
            assert await gen.tokens() == expected
            assert_close(logits(engine, fixed), wanted)
            rest = await fork.generate(HOW, max_tokens=7, stop_only=True).tokens()
            assert rest == expected[3:]
            opened = engine.open("kept")
            assert opened is not None
            assert await opened.generate(HOW, max_tokens=7, stop_only=True).tokens() == expected[3:]
            engine.delete("kept")
            for each in (fork, opened):
                each.release()

    ours.run(program)
    ours.sleep()
    ours.update_weights(state(models[1]))
    ours.wake()
    assert_close(logits(ours), logits(other))
    ours.sleep()  # and is closed while it sleeps


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [HOW, hw.Argmax(), hw.TopP(0.9, seed=3)])
def test_log_probabilities_of_drawn_tokens_are_the_trainers(models: Any, sampler: hw.Sampler) -> None:
    """From the pass that drew them: raw ones are the model's, processed ones those of the distribution drawn from."""
    _, folder, hf = models

    async def program(engine: hw.Engine) -> tuple[list[int], list[hw.Rank], list[hw.Rank]]:
        async with engine.context() as ctx:
            gen = ctx.fill(PROMPT).generate(sampler, max_tokens=12, stop_only=True, probe=hw.Ranking())
            raw = [step.probes[0].drawn[0] async for step in gen]
        async with engine.context() as ctx:
            probe = hw.Ranking(processed=True)
            gen = ctx.fill(PROMPT).generate(sampler, max_tokens=12, stop_only=True, probe=probe)
            seed = gen.seed
            processed = [step.probes[0].drawn[0] async for step in gen]
            assert seed == gen.seed
            return [rank.id for rank in raw], raw, processed

    with hw.Engine(folder, threads=1, pages=32, dtype="float32") as engine:
        tokens, raw, processed = engine.run(program)
    with torch.no_grad():
        whole = hf.double()(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    hf.float()
    scores = whole.log_softmax(-1)
    for i, (token, one, other) in enumerate(zip(tokens, raw, processed, strict=True)):
        assert one.id == other.id == token
        assert abs(one.logprob - float(scores[i, token])) < 1e-4
    if sampler is HOW:
        for i, (token, other) in enumerate(zip(tokens, processed, strict=True)):
            assert abs(other.logprob - float((whole[i] / 0.9).log_softmax(-1)[token])) < 1e-4
