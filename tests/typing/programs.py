"""Whole programs: running them, contexts, masks, pages, snapshots, generation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import assert_type

import numpy as np

import headway as hw
from headway import Argmax, Mask

SAMPLERS: list[hw.Sampler] = [
    Argmax(),
    hw.Multinomial(0.8),
    hw.TopK(40),
    hw.TopP(0.9, seed=3),
    hw.MinP(0.05),
    hw.Typical(0.95, temperature=1.2),
    hw.Sampling(temperature=0.7, top_k=50, logit_bias={17: -1.5}),
]


async def best_of(engine: hw.Engine, prompt: str, samplers: Iterable[hw.Sampler]) -> list[str]:
    async with engine.context(seed=1) as ctx:
        ctx.system("Be brief.").user(prompt).cue()
        await ctx.flush()
        forks = [ctx.fork() for _ in samplers]
        return await asyncio.gather(*(f.generate(s, max_tokens=8).text() for f, s in zip(forks, samplers)))


def from_a_script() -> None:
    with hw.Engine("smollm2", page_size=16, trim=False) as engine:
        assert_type(engine.run(best_of, "Hello", SAMPLERS), list[str])
        assert_type(engine.stats().pages_free, int)


async def masks(ctx: hw.Context) -> None:
    mask = (Mask.sink(4, 60) | Mask.window(8)) & ~Mask.blocks([3, 4], sees=[(1, 0)])
    assert_type(mask, Mask)
    assert_type(mask.picture(0, 8), str)
    assert_type(mask.to_bool(0, 8), np.ndarray)
    await ctx.forward().input([1]).attention_mask(mask).mask(allow=[1, 2]).execute()
    await ctx.forward().input(np.array([1, 2])).attention_mask([[3], [1, 2, 1]]).mask([100, 50, 17]).execute()
    await ctx.forward().input_at([1, 2], [5, 5]).attention_mask(Mask.from_bool(np.ones((2, 2)))).execute()
    await ctx.flush(Mask.window(4))


async def pages(ctx: hw.Context) -> int:
    raw = ctx.inner()
    raw.reserve_working_pages(2)
    await ctx.forward().input(range(20)).defer_commit().execute()
    raw.commit_working_pages(1)
    raw.truncate_working_page_tokens(1)
    raw.release_working_pages(1)
    raw.discard_pages(0, 1)
    assert_type(ctx.seq_len, int)
    assert_type(ctx.pending, tuple[int, ...])
    return raw.committed_page_count + raw.working_page_count + raw.working_page_token_count


def snapshots(engine: hw.Engine, ctx: hw.Context) -> hw.Context:
    ctx.save("draft", durable=True)
    found = engine.open("draft")
    assert_type(found, hw.Context | None)
    engine.delete("draft")
    return found if found is not None else ctx.truncate(1)


async def several(ctx: hw.Context, beams: int | None) -> list[hw.Context]:
    assert_type(ctx.generate(max_length=80, do_sample=True, no_repeat_ngram_size=3), hw.Generation[None])
    assert_type(ctx.generate(hw.TopP(0.9), repetition_penalty=1.2, stop=[3, "x"]), hw.Generation[None])
    found = ctx.generate(num_beams=4, length_penalty=0.6, early_stopping="never", max_tokens=8)
    assert_type(found, hw.Generations[None])
    assert_type(await found.texts(), list[str])
    assert_type(await found.text(), str)
    draws = ctx.generate(hw.Multinomial(), num_return_sequences=3, probe=hw.Entropy())
    assert_type(draws, hw.Generations[float])
    best, *_ = await draws.sequences()
    assert_type(best, hw.Continuation[float])
    assert_type(best.score, float)
    either: hw.Generation | hw.Generations = ctx.generate(num_beams=beams)
    assert_type(await either.tokens(), list[int])
    return await draws.contexts()


def publisher(engine: hw.Engine) -> hw.Sampler:
    assert_type(engine.generation_defaults.max_length, int | None)
    return engine.generation_defaults.sampler(temperature=0.3, seed=1)


async def steps(ctx: hw.Context) -> str:
    text = ""
    async for step in ctx.generate(Argmax(), max_tokens=4, stop=["\n"], probe=hw.Entropy()):
        assert_type(step, hw.Step[float])
        assert_type(step.probes, tuple[float, ...])
        text += step.text
    return text


async def probes(ctx: hw.Context, unknown: hw.Probe, optional: hw.Entropy | None) -> None:
    """Each probe's value has its type, alone and among others."""
    both = ctx.generate(Argmax(), probe=(hw.Entropy(), hw.Ranking(2)))
    assert_type(both, hw.Generation[tuple[float, hw.Ranked]])
    async for step in both:
        for entropy, ranked in step.probes:
            assert_type(entropy, float)
            assert_type(ranked.best[0].logprob, float)
    prepared = await both.prepare()
    assert_type(await prepared.take(), hw.Step[tuple[float, hw.Ranked]])
    three = ctx.generate(num_beams=2, probe=(hw.Hidden(0), hw.LogitLens([0], k=1), hw.Logprob(3)))
    assert_type(three, hw.Generations[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]], np.ndarray]])
    alike = ctx.generate(num_return_sequences=2, probe=[hw.Logprobs([1, 2]), hw.AttentionScores(0), hw.Logits()])
    assert_type((await alike.sequences())[0].probes, tuple[tuple[np.ndarray, ...], ...])
    mixed = ctx.generate(probe=[hw.Entropy(), hw.Distribution(k=3)])
    assert_type(mixed, hw.Generation[tuple[float | tuple[np.ndarray, np.ndarray], ...]])
    assert_type(ctx.generate(probe=optional), hw.Generation[float])
    either: hw.Generation = ctx.generate(probe=unknown)
    print(either.context)
