"""Priorities under load: who bids more is served first, and nobody starves.

An engine that computes four rows a step gets nine programs of the same length. The one that arrives last bids most and
is done first; those that bid least still advance, because a pass ranks one higher for every step it waits: a newer one
overtakes it for at most as many steps as the bids differ.
"""

import asyncio
import time

from rich.console import Console
from rich.table import Table

import headway as hw
from headway import Argmax

ROWS, NEW_TOKENS = 4, 24
BIDS = [0.0, 0.0, 0.0, 0.0, 8.0, 8.0, 8.0, 8.0, 100.0]  # in the order they arrive
PROMPT = (
    "Once upon a time there was a lighthouse keeper who had never seen the sea, because on his island there was fog"
)


async def program(engine: hw.Engine) -> tuple[list[float], dict[float, int], int]:
    finished: list[float] = []
    longest = dict.fromkeys(BIDS, 0)  # steps between two tokens, at most
    table = Table("arrived", "bid", "longest wait", "finished after", title=f"{len(BIDS)} programs, {ROWS} rows a step")

    async def one(ctx: hw.Context, number: int, bid: float) -> None:
        waits, last = [], ctx.engine.stats().steps
        async for _ in ctx.set_bid(bid).generate(Argmax(), max_tokens=NEW_TOKENS):
            waits.append(ctx.engine.stats().steps - last)
            last += waits[-1]
        finished.append(bid)
        longest[bid] = max(longest[bid], *waits)
        table.add_row(str(number), f"{bid:g}", f"{max(waits)} steps", f"{time.perf_counter() - began:.1f} s")

    size, threads = engine.page_size, engine.info.threads
    with hw.Engine(engine.decoder, max_batch_tokens=ROWS, pages=64, page_size=size, threads=threads) as busy:
        ctx = busy.context().fill(engine.tokenizer.encode(PROMPT))
        await ctx.flush()
        forks = [ctx.fork() for _ in BIDS]
        shared = len(forks) * (ctx.seq_len // size)
        began = time.perf_counter()
        await asyncio.gather(*(one(fork, number, bid) for number, (fork, bid) in enumerate(zip(forks, BIDS), 1)))
    Console().print(table)
    print(f"{time.perf_counter() - began:.1f} s in all; {shared} pages were shared instead of held again")
    return finished, longest, shared


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
