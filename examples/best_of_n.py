"""Best of n by log-probability (sample and rank, Adiwardana et al., 2020): draw several, keep the likeliest.

The prompt is computed once, its pages are shared by the forks, and the forks' passes run as one batch a step. A probe
beside the sampler brings each draw's probability, so that scoring takes no further pass. The mean, not the sum: a sum
would prefer short texts.
"""

import asyncio
import math

from rich.console import Console
from rich.table import Table

import headway as hw

N, K, NEW_TOKENS = 6, 30, 20
PROMPT = (
    "The old lighthouse keeper had not left the island for thirty years. Every evening he climbed the stairs, lit the "
    "lamp and wrote one line about the weather in his book. But tonight, when he reached the top,"
)


async def draw(ctx: hw.Context, seed: int) -> tuple[float, str]:
    """A continuation and the mean log-probability of its tokens."""
    sampler, probe = hw.TopK(K, seed=seed), hw.Distribution(k=K)  # what TopK draws from is what the probe brings back
    logps, text = [], ""
    async for step in ctx.generate(sampler, max_tokens=NEW_TOKENS, stop=[".", "\n"], probe=probe):
        for token, (ids, probs) in zip(step.tokens, step.probes):
            logps.append(math.log(dict(zip(ids.tolist(), probs.tolist()))[token]))
        text += step.text
    return sum(logps) / max(1, len(logps)), text


async def program(engine: hw.Engine) -> tuple[list[tuple[float, str]], tuple[int, int], tuple[int, int]]:
    start = engine.stats()
    async with engine.context(salt="best of n") as ctx:
        await ctx.fill(PROMPT).flush()
        forks = [ctx.fork() for _ in range(N)]
        drawn = sorted(await asyncio.gather(*map(draw, forks, range(N))), reverse=True)
        end = engine.stats()
        pages = end.pages_held - start.pages_held, sum(-(-f.seq_len // f.page_size) for f in (ctx, *forks))
        tokens = end.tokens - start.tokens, sum(f.seq_len for f in forks)
        for fork in forks:
            fork.release()
    table = Table("mean log p", "continuation", title="best first")
    for score, text in drawn:
        table.add_row(f"{score:.2f}", text.strip())
    Console().print(table)
    print(f"{tokens[0]} tokens computed; n prompts apart: {tokens[1]}. {pages[0]} pages held; apart: {pages[1]}")
    return drawn, tokens, pages


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
