"""Page-trim, measured: pages that every row masks are left out of attention, and the result does not change.

The same weights run in two engines, one of them with trim=False. Masking whole pages lets the trim land; masking as
many slots with one left in every page does not. How much time it saves depends on how large attention looms: in a
small model most of a step goes to the weights, which no mask makes cheaper.
"""

import numpy as np
from rich.console import Console
from rich.table import Table

import headway as hw
from headway import Logits, Mask

PAGE, ROWS, REPEATS = 16, 16, 3


async def measure(ctx: hw.Context, attend: np.ndarray) -> tuple[np.ndarray, int, float]:
    """The last row's logits, the pages trimmed, and the best time of a pass of ROWS rows, in milliseconds."""
    view = np.hstack([np.tile(attend, (ROWS, 1)), np.tri(ROWS, dtype=bool)])  # among themselves the rows are causal
    runs = []
    for _ in range(REPEATS):
        fwd = ctx.forward().input(range(100, 100 + ROWS)).attention_mask(Mask.from_bool(view))
        last = fwd.probe(-1, Logits())
        out = await fwd.execute()
        runs.append((out.stats.seconds, out.stats.pages_trimmed, out.logits(last)))
        ctx.truncate(ROWS)
    seconds, trimmed, logits = min(runs, key=lambda run: run[0])
    return logits, trimmed, 1000 * seconds


async def program(engine: hw.Engine, slots: int = 1024) -> tuple[dict[tuple[str, str], int], float]:
    n = slots // PAGE
    whole, scattered = np.zeros(slots, dtype=bool), np.zeros(slots, dtype=bool)
    whole[:PAGE] = whole[PAGE - n :] = True  # a page of sink, the rest as a window: n slots
    scattered[::PAGE] = True  # n slots too, one in every page
    table = Table("mask", "trim", "pages trimmed", "time", title=f"{slots} slots, {ROWS} rows a pass")
    trimmed, rows = {}, {}
    with hw.Engine(engine.decoder, trim=False, pages=n + 1, page_size=PAGE, threads=engine.info.threads) as untrimmed:
        for trim, where in [("on", engine), ("off", untrimmed)]:
            async with where.context() as ctx:
                await ctx.fill(i % 1000 for i in range(slots)).flush()
                for name, attend in [("whole pages", whole), ("scattered", scattered)]:
                    rows[name, trim], trimmed[name, trim], ms = await measure(ctx, attend)
                    table.add_row(name, trim, f"{trimmed[name, trim]} of {n + 1}", f"{ms:.0f} ms")
    Console().print(table)
    apart = max(float(np.abs(rows[name, "on"] - rows[name, "off"]).max()) for name in ("whole pages", "scattered"))
    print(f"largest difference of a logit with and without trim: {apart:.6f}")
    return trimmed, apart


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
