"""Map-reduce: summarize the parts of a text at the same time, then the summaries.

The map step is one `asyncio.gather`. Every part's chat opens with the same instructions; nobody forks anything, and
still they are computed once: whoever comes second finds the pages in the prefix cache, or waits for the one who is
computing them at that moment.
"""

import asyncio
import time

import headway as hw
from headway import Argmax

RULES = """You shorten texts. Answer with one plain sentence that keeps the most important fact, the names and the
numbers of the text you are given, and leaves out everything else. Do not add anything that is not in the text, do
not comment on it, and do not explain what you did."""
PARTS = [
    """The harbour of Lund was built in 1821 by the engineer Anna Berg. It took nine years and two hundred workers,
because the sea bed was rock and every stone had to be carried by boat.""",
    """In 1904 a storm broke the northern wall. The town had no money, so the fishermen repaired it themselves in a
single winter and gave up half of their season for it.""",
    """Today forty boats use the harbour. Most of them carry visitors to the islands, and the fish market opens only on
Saturdays, in the hall where the sails were once sewn.""",
    """The council wants to build a bridge to the largest island by 2030. The boatmen are against it: they say that a
bridge would end their work and bring ten thousand cars to a place that has one road.""",
]


async def shorten(engine: hw.Engine, text: str, max_tokens: int) -> str:
    async with engine.context() as ctx:
        ctx.system(RULES).user(text)
        return (await ctx.generate(Argmax(), max_tokens=max_tokens).text()).strip()


async def program(engine: hw.Engine) -> tuple[list[str], str, int]:
    engine.cache.clear()
    before, began = engine.stats(), time.perf_counter()
    summaries = await asyncio.gather(*(shorten(engine, part, 24) for part in PARTS))
    mapped = time.perf_counter()
    whole = await shorten(engine, "\n".join(summaries), 40)
    ended, after = time.perf_counter(), engine.stats()

    for summary in summaries:
        print(f"  · {summary}")
    print(f"all together: {whole}")
    shared = after.cache_hits - before.cache_hits
    batch = (after.passes - before.passes) / (after.steps - before.steps)
    print(
        f"map {mapped - began:.1f} s for {len(PARTS)} parts, reduce {ended - mapped:.1f} s, {batch:.1f} passes a step"
    )
    print(f"{shared} pages of {engine.page_size} tokens were shared instead of computed again")
    return summaries, whole, shared


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
