"""Two tenants on one engine: the same prompt, and nothing shared between them.

A cache hit answers sooner, so whoever can time answers could learn what others have asked. Contexts of different
`salt` never share cached pages: a tenant's first pass computes the whole prompt, its second one finds it.
"""

import time

from rich.console import Console
from rich.table import Table

import headway as hw
from headway import Argmax

PROMPT = """Minutes of the board, not to be passed on. The company will close the plant in Norden at the end of March.
Of its two hundred people, eighty are offered work in Halden. The machines are sold to the highest bidder, the building
goes back to the town. The press is told on the first of February, the people one day before. Until then nobody who is
not on the board may know. In one sentence, the plan is to"""


async def program(engine: hw.Engine) -> tuple[list[int], list[int]]:
    engine.cache.clear()
    table = Table("tenant", "pages found in the cache", "first token", title="the same prompt four times")
    hits, held = [], []

    async def ask(tenant: str) -> hw.Context:
        ctx = engine.context(salt=tenant).fill(PROMPT)
        fwd, began = ctx.forward(), time.perf_counter()
        fwd.sample([-1], Argmax())
        out = await fwd.execute()
        hits.append(out.stats.cache_hits)
        table.add_row(tenant, str(hits[-1]), f"{1000 * (time.perf_counter() - began):.0f} ms")
        return ctx

    start = engine.stats().pages_held
    contexts = []
    for tenant in ("north", "north", "south", "south"):
        contexts.append(await ask(tenant))
        held.append(engine.stats().pages_held - start)
    Console().print(table)
    one, two, three, four = held
    print(f"pages held: {one} by north, {two} with its second context; {three} and {four} with those of south")
    print(f"within a tenant {2 * one - two} pages are shared, between the tenants {two + one - three}")
    for ctx in contexts:
        ctx.release()
    return hits, held


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
