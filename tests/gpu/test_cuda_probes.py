"""Probes answered on the device, beside the samplers of the same step, against the torch reference.

Needs a GPU and random models only. Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.base.specs.probes import Ranked, Ranking
from headway.testing import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

V = 5003  # more than one piece of a row
SAMPLERS = (
    hw.Argmax(),
    hw.Multinomial(0.8, seed=1),
    hw.TopP(0.9, seed=2),
    hw.Sampling(temperature=0.9, repetition_penalty=1.3, logit_bias={3: 5.0}, seed=3),
    hw.Typical(0.8, seed=4),
)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, count).tolist()


async def asked(engine: hw.Engine, i: int) -> tuple[list[int], list[Any]]:
    """One context's steps, every kind of probe beside a sampler."""
    async with engine.context() as context:
        context.fill(tokens(5 + i, i))
        drawn: list[int] = []
        found: list[Any] = []
        for step in range(4):
            forward = context.forward()
            if drawn:
                forward.input(drawn[-1:])
            if i % 3 == 1:
                forward.mask(allow=list(range(i, V, 7)))
            token = forward.sample([-1], SAMPLERS[i % len(SAMPLERS)])
            masked = i % 2 == 1
            ids = tokens(3, step)
            handles = (
                forward.probe(-1, hw.Logits(masked=masked)),
                forward.probe(-1, hw.Distribution(0.7, k=5)),
                forward.probe(-1, hw.Distribution(k=0, masked=masked)),
                forward.probe(-1, hw.Logprobs(ids)),
                forward.probe(-1, hw.Logprob(ids[0], masked=masked)),
                forward.probe(-1, hw.Entropy(masked=masked)),
            )
            ranks = [forward.probe(-1, Ranking(k, ids, processed=p)) for k, p in ((0, False), (4, False), (3, True))]
            out = await forward.execute()
            drawn.append(out.token(token))
            logits, few, whole, logs, log, entropy = handles
            found += [out.logits(logits), *out.distribution(few), *_by_id(out.distribution(whole))]
            found += [out.logprobs(logs), out.logprobs(log), out.entropy(entropy)]
            found += [out.ranking(handle) for handle in ranks]
        return drawn, found


def _by_id(pair: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray]:
    whole = np.zeros(V)
    whole[pair[0]] = pair[1]
    return (whole,)


async def several(engine: hw.Engine, count: int) -> list[tuple[list[int], list[Any]]]:
    return list(await asyncio.gather(*(asked(engine, i) for i in range(count))))


def agree(found: Any, expected: Any) -> None:
    if isinstance(expected, Ranked):
        lists = ((*r.drawn, *r.ids, *r.best) for r in (found, expected))
        for mine, theirs in zip(*lists, strict=True):
            assert mine.id == theirs.id
            # Far behind, scores lie closer to each other than their rounding.
            assert abs(mine.rank - theirs.rank) <= theirs.rank // 100
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    elif np.issubdtype(np.asarray(expected).dtype, np.integer):
        assert np.array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def engine(mode: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> hw.Engine:
    monkeypatch.setenv("HEADWAY_NATIVE", mode)
    return hw.Engine(random_model(device="cuda", vocab_size=V, seed=3), device="cuda", pages=512, **options)


@pytest.mark.parametrize("count", [1, 4, 31])
def test_every_probe_beside_every_sampler_is_that_of_torch(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("auto", monkeypatch) as fast, engine("off", monkeypatch) as slow:
        assert (fast.info.runner, slow.info.runner) == ("triton", "torch")
        for _ in range(2):
            for (drawn, values), (token, others) in zip(
                fast.run(several, count), slow.run(several, count), strict=True
            ):
                assert drawn == token
                for value, other in zip(values, others, strict=True):
                    agree(value, other)


def test_probes_stay_in_graphs_and_leave_the_draw_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("auto", monkeypatch) as fast:
        runner: Any = fast._loop._runner
        calls: list[str] = []
        slow = runner._readers[0]._slow
        whole, ranked = slow.answers, slow.ranked
        monkeypatch.setattr(slow, "answers", lambda *a: (calls.append("answers"), whole(*a))[1])
        monkeypatch.setattr(slow, "ranked", lambda *a: (calls.append("ranked"), ranked(*a))[1])

        async def steps(engine: hw.Engine) -> None:
            async with engine.context() as context:
                context.fill(tokens(9, 1))
                for _ in range(5):
                    forward = context.forward().input([4])
                    forward.sample([-1], hw.Sampling(temperature=0.7, frequency_penalty=0.3, seed=1))
                    forward.probe(-1, hw.Entropy())
                    forward.probe(-1, hw.Distribution(k=3))
                    forward.probe(-1, Ranking(3))
                    await forward.execute()

        fast.run(steps)
        captured = [key[0] for key, graph in runner._graphs.graphs.items() if graph is not None]
        assert {"step", "head", "draw", "probe"} <= set(captured)
        assert calls == []


def test_many_rows_and_more_ids_than_a_round_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(engine: hw.Engine) -> list[np.ndarray]:
        async with engine.context() as context:
            forward = context.forward().input(tokens(700, 5))
            named = [forward.probe(i, hw.Logprobs(tokens(9, i))) for i in range(700)]
            wide = forward.probe(3, hw.Logprobs(range(5000)))
            out = await forward.execute()
            return [*(out.logprobs(h) for h in named), out.logprobs(wide)]

    with engine("auto", monkeypatch) as fast, engine("off", monkeypatch) as slow:
        for found, expected in zip(fast.run(score), slow.run(score), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_seen_inside_the_model_is_that_of_torch(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def inside(engine: hw.Engine) -> list[np.ndarray]:
        async with engine.context() as context:
            context.fill(tokens(40, 2))
            forward = context.forward().input(tokens(6, 3))
            states = [forward.probe(i, hw.Hidden(l)) for i in (0, 5) for l in (0, 1, 2)]
            scores = [forward.probe(5, hw.AttentionScores(1)), forward.probe(0, hw.AttentionScores(0, "mean"))]
            lens = forward.probe(4, hw.LogitLens([0, 2], 0))
            entropy = forward.probe(2, hw.Entropy())
            out = await forward.execute()
            found = [*(out.hidden(h) for h in states), *(out.attention(h) for h in scores)]
            return [*found, *(_by_id(pair)[0] for pair in out.lens(lens)), np.array(out.entropy(entropy))]

    def run(mode: str) -> list[np.ndarray]:
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        model = random_model("mistral", device="cuda", dtype=dtype, vocab_size=V)
        with hw.Engine(model, device="cuda", pages=64) as one:
            return one.run(inside)

    limit = 1e-4 if dtype == "float32" else 0.06
    for found, expected in zip(run("auto"), run("off"), strict=True):
        assert np.abs(found - expected).max() <= limit * max(1.0, np.abs(expected).max())
