"""Where tokens stand: the `Ranking` probe against numpy, penalties without the prompt, and what the cache saved."""

from __future__ import annotations

import math

import numpy as np
import pytest

import headway as hw
from headway.testing import random_model

PROMPT = [5, 17, 3, 44, 5, 60, 2, 9]


@pytest.fixture(scope="module")
def engine():
    with hw.Engine(random_model(), pages=64, threads=1) as made:
        yield made


def log_softmax(logits):
    scores = logits.astype(np.float64)
    return scores - scores.max() - math.log(np.exp(scores - scores.max()).sum())


async def generated(engine, sampler, probe, penalize_prompt=True):
    async with engine.context() as ctx:
        ctx.fill(PROMPT)
        generation = ctx.generate(sampler, max_tokens=4, probe=probe, penalize_prompt=penalize_prompt)
        return [step async for step in generation]


def test_ranks_are_those_of_the_logits(engine):
    async def program(engine):
        async with engine.context() as ctx:
            forward = ctx.forward().input(PROMPT)
            logits = [forward.probe(i, hw.Logits()) for i in range(len(PROMPT))]
            ranks = [forward.probe(i, hw.Ranking(k=3, ids=[7, 0])) for i in range(len(PROMPT))]
            out = await forward.execute()
            return [(out.logits(a), out.ranking(b)) for a, b in zip(logits, ranks)]

    for logits, found in engine.run(program):
        scores = log_softmax(logits)
        order = np.argsort(-scores, kind="stable")
        assert [one.id for one in found.best] == order[:3].tolist()
        assert [one.rank for one in found.best] == [1, 2, 3]
        assert found.drawn == ()
        for one, token in zip(found.ids, (7, 0)):
            assert one.id == token
            assert one.logprob == pytest.approx(scores[token], abs=1e-9)
            assert one.rank == 1 + order.tolist().index(token)


def test_the_drawn_token_is_ranked(engine):
    steps = engine.run(generated, hw.Multinomial(1.5, seed=3), hw.Ranking(k=2))
    for step in steps:
        (drawn,) = step.probes[0].drawn
        assert (drawn.id,) == step.tokens
        if drawn.rank <= 2:
            assert step.probes[0].best[drawn.rank - 1] == drawn


def test_processed_ranks_are_those_of_the_draw(engine):
    sampler = hw.Sampling(temperature=0.7, top_k=5, logit_bias={11: 2.0}, seed=4)
    raw = engine.run(generated, sampler, hw.Ranking(k=97))
    drawn = engine.run(generated, sampler, hw.Ranking(k=97, processed=True))
    for a, b in zip(raw, drawn):
        scores = {one.id: one.logprob + (2.0 if one.id == 11 else 0.0) for one in a.probes[0].best}
        kept = sorted(scores, key=lambda id: (-scores[id], id))[:5]
        whole = math.log(sum(math.exp(scores[id] / 0.7) for id in kept))
        found = {one.id: one.logprob for one in b.probes[0].best}
        assert list(found) == kept, "the others cannot come and are left out"
        assert found == pytest.approx({id: scores[id] / 0.7 - whole for id in kept}, abs=1e-6)


def test_greedy_processed_ranks_stand_before_the_filters(engine):
    steps = engine.run(generated, hw.Sampling(temperature=0.0, logit_bias={11: 1.0}), hw.Ranking(k=97, processed=True))
    for step in steps:
        assert len(step.probes[0].best) == 97
        assert sum(math.exp(one.logprob) for one in step.probes[0].best) == pytest.approx(1.0)


def test_bad_rankings_are_refused(engine):
    with pytest.raises(hw.InvalidInput, match="k is 98; this model has 97"):
        engine.run(generated, hw.Argmax(), hw.Ranking(k=98))
    with pytest.raises(hw.InvalidToken, match="97"):
        engine.run(generated, hw.Argmax(), hw.Ranking(ids=[97]))
    with pytest.raises(hw.WrongType, match="processed"):
        hw.Ranking(processed=1)  # type: ignore[arg-type]


def test_penalties_may_leave_the_prompt_alone(engine):
    """With the prompt counted another first token comes; without, the first is that of no penalty at all."""
    plain = engine.run(generated, hw.Argmax(), None)[0].tokens
    strong = hw.Sampling(temperature=0.0, repetition_penalty=50.0)
    assert engine.run(generated, strong, None, False)[0].tokens == plain
    biased = hw.Sampling(temperature=0.0, repetition_penalty=5000.0, logit_bias={PROMPT[0]: 1000.0})
    counted, free = (engine.run(generated, biased, None, flag) for flag in (True, False))
    assert counted[0].tokens != (PROMPT[0],)
    assert free[0].tokens == (PROMPT[0],)
    assert free[1].tokens != (PROMPT[0],), "what was generated counts"


def test_a_context_says_what_the_cache_saved(engine):
    async def program(engine, salt):
        async with engine.context(salt=salt) as ctx:
            ctx.fill([*range(1, 60)])
            await ctx.generate(hw.Argmax(), max_tokens=2).tokens()
            return ctx.cached_tokens

    assert engine.run(program, "first") == 0
    assert engine.run(program, "first") == 48
    assert engine.run(program, "other") == 0
