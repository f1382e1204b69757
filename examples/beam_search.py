"""Beam search: the likeliest text, where taking the likeliest token each time finds a less likely one.

Four continuations grow side by side, one batch a step, and those of the highest probability so far go on. Beams are
forks: the prompt is there once, and so is whatever they have in common behind it.
"""

import asyncio
import math

from rich.console import Console
from rich.table import Table

import headway as hw

BEAMS, NEW_TOKENS = 4, 12
PROMPT = (
    "My grandmother kept bees for forty years, in six white hives behind the house, and she taught all of us how to "
    "care for them. The most important thing she taught me was"
)


async def greedy(ctx: hw.Context) -> tuple[float, str]:
    """The text of the likeliest token each time, and its log-probability."""
    steps = ctx.generate(hw.Argmax(), max_tokens=NEW_TOKENS, stop_only=True, probe=hw.Distribution(k=1))
    found = [(sum(math.log(probs[0]) for _, probs in step.probes), step.text) async for step in steps]
    return sum(logp for logp, _ in found), "".join(text for _, text in found)


async def watch(engine: hw.Engine, most: list[int]) -> None:
    """Note the largest number of pages held at any time."""
    while True:
        most[0] = max(most[0], engine.stats().pages_held)
        await asyncio.sleep(0.001)


async def program(engine: hw.Engine) -> tuple[list[tuple[float, str]], tuple[int, int], tuple[int, int]]:
    most, start = [0], engine.stats()
    async with engine.context(salt="beams") as ctx:
        await ctx.fill(PROMPT).flush()
        watching = asyncio.create_task(watch(engine, most))
        search = ctx.fork().generate(
            num_beams=BEAMS, num_return_sequences=BEAMS, max_tokens=NEW_TOKENS, length_penalty=0.0, stop_only=True
        )  # without a length penalty a beam's score is its log-probability
        beams = [(beam.score, beam.text) for beam in await search.sequences()]
        watching.cancel()
        search.context.release()
        tokens, pages = engine.stats().tokens - start.tokens, most[0] - start.pages_held
        whole = ctx.seq_len + NEW_TOKENS
        found = [await greedy(ctx), *beams]
    table = Table("", "log p", "text")
    for number, (score, text) in enumerate(found):
        table.add_row(f"beam {number}" if number else "greedy", f"{score:.2f}", text.strip())
    Console().print(table)
    apart = BEAMS * (whole - 1), BEAMS * -(-whole // ctx.page_size)
    print(f"{tokens} tokens computed, {pages} pages held at most; {BEAMS} sequences apart: {apart[0]} and {apart[1]}")
    return found, (tokens, apart[0]), (pages, apart[1])


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
