"""What a user writes around one pass, and the types a checker must give it."""

from __future__ import annotations

from typing import assert_type

import numpy as np

import headway as hw
from headway import Argmax, Distribution, Entropy


async def next_tokens(engine: hw.Engine) -> tuple[int, list[int]]:
    async with engine.context() as ctx:
        assert_type(ctx, hw.Context)
        fwd = ctx.fill("Kubernetes pods are scheduled by the").forward()
        one = fwd.sample([-1], Argmax())
        many = fwd.sample((-1, -1), hw.TopKTopP(40, 0.9, temperature=0.7, seed=1))
        assert_type(one, hw.SampleHandle)
        out = await fwd.execute()
        assert_type(out, hw.Output)
        assert_type(out.token(one), int)
        assert_type(out.tokens(many), list[int])
        return out.token(one), out.tokens(many)


async def every_probe(ctx: hw.Context) -> None:
    fwd = ctx.forward().input([1, 2, 3])
    distribution = fwd.probe(-1, Distribution(temperature=1.0, k=8))
    entropy = fwd.probe(0, Entropy())
    logits = fwd.probe(1, hw.Logits(masked=True))
    logprob = fwd.probe(2, hw.Logprob(17))
    logprobs = fwd.probe(2, hw.Logprobs([17, 18]))
    hidden = fwd.probe(2, hw.Hidden(0))
    attention = fwd.probe(2, hw.AttentionScores(3, reduce="mean"))
    lens = fwd.probe(2, hw.LogitLens(range(4), k=5))
    assert_type(distribution, hw.ProbeHandle[Distribution])
    out = await fwd.execute()
    assert_type(out.distribution(distribution), tuple[np.ndarray, np.ndarray])
    assert_type(out.entropy(entropy), float)
    assert_type(out.logits(logits), np.ndarray)
    assert_type(out.logprobs(logprob), np.ndarray)
    assert_type(out.logprobs(logprobs), np.ndarray)
    assert_type(out.hidden(hidden), np.ndarray)
    assert_type(out.attention(attention), np.ndarray)
    assert_type(out.lens(lens), list[tuple[np.ndarray, np.ndarray]])
    assert_type(out.stats.pages_trimmed, int)
    assert_type(out.stats.seeds, tuple[int, ...])


def without_an_event_loop(ctx: hw.Context) -> float:
    fwd = ctx.forward()
    handle = fwd.probe(-1, Entropy())
    return fwd.execute().result(timeout=5.0).entropy(handle)


async def one_pass_ahead(ctx: hw.Context) -> tuple[int, int]:
    first = ctx.forward()
    a = first.sample([-1], Argmax())
    running = first.execute()
    second = ctx.forward().input(a)
    b = second.sample([-1], Argmax())
    later = second.execute()
    return (await running).token(a), (await later).token(b)
