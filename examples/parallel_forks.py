"""Parallel forks: one prompt, several continuations at once, one batch a step.

`asyncio.gather` is all it takes: passes of different contexts that wait at the same time run in one step, which reads
the weights once for all of them. Unseeded forks draw differently; these have seeds so that the output repeats.
"""

import asyncio
import time

from rich.console import Console
from rich.table import Table

import headway as hw
from headway import TopP

FORKS, NEW_TOKENS = 5, 12
PROMPT = "The old captain opened the map, put his finger on a small island and said:"


async def program(engine: hw.Engine) -> tuple[list[str], list[str], float]:
    async def continuation(seed: int) -> str:
        async with ctx.fork() as fork:
            return await fork.generate(TopP(0.9, temperature=0.8, seed=seed), max_tokens=NEW_TOKENS).text()

    table = Table("how", "steps", "passes a step", "seconds", title=f"{FORKS} continuations of {NEW_TOKENS} tokens")
    async with engine.context() as ctx:
        await ctx.fill(PROMPT).flush()
        texts: dict[str, list[str]] = {}
        sizes = {}
        for how in ("one after the other", "together"):
            before, began = engine.stats(), time.perf_counter()
            if how == "together":
                texts[how] = await asyncio.gather(*map(continuation, range(FORKS)))
            else:
                texts[how] = [await continuation(seed) for seed in range(FORKS)]
            seconds, after = time.perf_counter() - began, engine.stats()
            steps = after.steps - before.steps
            sizes[how] = (after.passes - before.passes) / steps
            table.add_row(how, str(steps), f"{sizes[how]:.1f}", f"{seconds:.1f}")
    for text in texts["together"]:
        print(f"  …{text!r}")
    Console().print(table)
    return texts["one after the other"], texts["together"], sizes["together"]


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
