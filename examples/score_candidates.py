"""Scoring candidate strings: the probability of whole answers, read off single passes that sample nothing.

The question is computed once; each candidate is a fork that adds only its own tokens. A row's probe tells how likely
the token after it is, so the candidate's first token is scored at the row just before the input.
"""

import asyncio
import math

from rich.console import Console
from rich.table import Table

import headway as hw

QUESTION = "The largest planet in the solar system is"
CANDIDATES = [" Jupiter", " Saturn", " the planet Venus", " the Sun", " a very large onion"]


async def score(ctx: hw.Context, ids: list[int]) -> float:
    """log p(ids | ctx), in nats."""
    fwd = ctx.forward().input(ids[:-1])  # the last token is scored, never computed
    before = -len(ids)  # with n rows, -(n + 1) is the token just before them
    handles = [fwd.probe(row, hw.Logprob(token)) for row, token in zip([before, *range(len(ids) - 1)], ids)]
    out = await fwd.execute()
    return sum(float(out.logprobs(h)[0]) for h in handles)


async def program(engine: hw.Engine) -> dict[str, float]:
    before = engine.stats().tokens
    async with engine.context() as ctx:
        await ctx.fill(QUESTION).flush()
        answers = [engine.tokenizer.encode(text) for text in CANDIDATES]
        scores = await asyncio.gather(*(score(ctx.fork(), ids) for ids in answers))
        apart = sum(ctx.seq_len + len(ids) - 1 for ids in answers)
    table = Table("candidate", "tokens", "log p", "p", title=f"{QUESTION} …")
    for text, ids, logp in sorted(zip(CANDIDATES, answers, scores), key=lambda row: -row[2]):
        table.add_row(repr(text), str(len(ids)), f"{logp:.2f}", f"{math.exp(logp):.3%}")
    Console().print(table)
    print(f"{engine.stats().tokens - before} tokens computed; without forks it would have been {apart}")
    return dict(zip(CANDIDATES, scores))


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
