"""Mixing LoRA adapters without gradients (LoraHub, Huang et al., 2023): try many mixtures, all of them in one batch.

Each pass names the adapters it is computed under, and their scales. So a whole generation of mixtures is scored on the
few examples at once, and the best is changed a little and tried again. The adapters here are random, small changes of
the model, because none come with it: even among those the search finds a mixture that fits the examples better.
"""

import asyncio

import numpy as np

import headway as hw
from headway.testing import random_adapter

ADAPTERS, TRIED, ROUNDS = 4, 8, 3
EXAMPLES = "Apple: FRUIT\nCarrot: VEGETABLE\nBanana: FRUIT\nOnion: VEGETABLE\n"


async def score(engine: hw.Engine, adapters: list[hw.Adapter], scales: np.ndarray) -> float:
    """The log-probability of the examples under a mixture, per token."""
    ids = engine.tokenizer.encode(EXAMPLES)
    async with engine.context() as ctx:
        fwd = ctx.forward().input(ids[:-1])
        for adapter, scale in zip(adapters, scales.tolist()):
            fwd.adapter(adapter, scale)
        handles = [fwd.probe(row, hw.Logprob(token)) for row, token in enumerate(ids[1:])]
        out = await fwd.execute()
    return float(np.mean([out.logprobs(handle)[0] for handle in handles]))


async def program(engine: hw.Engine) -> tuple[float, float, int]:
    adapters = [random_adapter(engine.config, rank=2, seed=seed, strength=0.1) for seed in range(ADAPTERS)]
    random = np.random.default_rng(0)
    best, before = np.zeros(ADAPTERS), engine.stats()
    plain = top = await score(engine, adapters, best)
    for number in range(ROUNDS):
        tried = best + random.normal(0, 0.5, (TRIED, ADAPTERS))
        scores = await asyncio.gather(*(score(engine, adapters, scales) for scales in tried))
        if max(scores) > top:
            best, top = tried[np.argmax(scores)], max(scores)
        print(f"round {number + 1}: {top:.3f} with scales {np.round(best, 1).tolist()}")
    steps = engine.stats().steps - before.steps - 1
    print(f"without adapters {plain:.3f} a token, mixed {top:.3f}: {TRIED * ROUNDS} mixtures in {steps} steps")
    return plain, top, steps


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
