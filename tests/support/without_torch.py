"""A program that uses every part of the native path, run with torch or where torch cannot be imported.

`python -m support.without_torch MODEL ADAPTER CACHE` prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

import headway as hw

PROMPT = [3, 14, 15, 92, 65, 35, 8, 9, 7, 9, 3, 23, 84, 62, 6, 43, 38, 32, 79, 50]
SAMPLERS = {
    "greedy": hw.Argmax(),
    "nucleus": hw.TopP(0.9, temperature=0.8),
    "rare": hw.Sampling(temperature=1.1, typical_p=0.8, epsilon_cutoff=1e-4, eta_cutoff=1e-3),
    "penalties": hw.Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "bias": hw.Sampling(temperature=1.0, logit_bias={5: 4.0, 7: -2.0}),
}


async def program(engine: hw.Engine, adapter: str) -> dict[str, Any]:
    """Tokens, probes, a mask, a fork, pages that move, a snapshot, beams and an adapter."""
    found: dict[str, Any] = {}
    for name, sampler in SAMPLERS.items():
        async with engine.context(seed=7) as ctx:
            ctx.fill(PROMPT)
            found[name] = list(await ctx.generate(sampler, max_tokens=12).tokens())
    async with engine.context(seed=7) as ctx:
        ctx.fill(PROMPT[:-1])
        fwd = ctx.forward().input(PROMPT[-1:])
        logits, shares = fwd.probe(-1, hw.Logits()), fwd.probe(-1, hw.Distribution(0.7, 5))
        some, spread = fwd.probe(-1, hw.Logprobs((1, 2, 3))), fwd.probe(-1, hw.Entropy())
        state, lens = fwd.probe(-1, hw.Hidden(engine.config.layers)), fwd.probe(-1, hw.LogitLens((0, 1), 3))
        scores = fwd.probe(-1, hw.AttentionScores(engine.config.attention_layers[-1]))
        out = await fwd.execute()
        values = (out.logits(logits), out.distribution(shares), out.logprobs(some), out.entropy(spread))
        found["probes"] = _plain((*values, out.hidden(state), out.lens(lens), out.attention(scores)))
        branch = ctx.fork()
        ctx.save("here", durable=True)
        masked = branch.forward().input([11]).mask(allow=range(20, 40))
        token = masked.sample([-1], hw.Argmax())
        found["masked"] = (await masked.execute()).token(token)
        branch.release()
    again = engine.open("here")
    assert again is not None
    found["snapshot"] = list(await again.generate(hw.Argmax(), max_tokens=8).tokens())
    again.release()
    async with engine.context() as ctx:
        ctx.fill(PROMPT)
        beams = await ctx.generate(max_tokens=6, num_beams=3, num_return_sequences=3).sequences()
        found["beams"] = [list(each.tokens) for each in beams]
    if adapter:
        style = hw.Adapter.load(adapter)
        async with engine.context() as ctx:
            ctx.fill(PROMPT)
            found["adapter"] = list(await ctx.generate(hw.Argmax(), max_tokens=8, adapter=style).tokens())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, float | np.floating) else value


def run(model: str, adapter: str, cache: str, **options: Any) -> dict[str, Any]:
    """What the program finds with this model."""
    os.environ["HEADWAY_CACHE"] = cache
    with hw.Engine(model, threads=1, pages=64, **options) as engine:
        return {"runner": engine.info.runner, **engine.run(program, adapter)}


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    print(json.dumps(run(*sys.argv[1:4], **json.loads(sys.argv[4]))))
