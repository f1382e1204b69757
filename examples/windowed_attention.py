"""Windowed attention that frees its pages: memory stays flat however long the text grows.

Every row sees the first SINK slots and the last WINDOW. A page that no later row can see is discarded: it is free for
other programs at once, while slot numbers and positions go on as if it were there.
"""

from rich.console import Console
from rich.table import Table

import headway as hw
from headway import Mask, Sampling

SINK, WINDOW, NEW_TOKENS = 16, 32, 72  # a sink of 0 is plain windowing; attention_sink.py shows what it costs
SAMPLER = Sampling(temperature=0, repetition_penalty=1.3)
PROMPT = "A short history of the bicycle. The first bicycles were built in the early nineteenth century, when"


async def program(engine: hw.Engine) -> list[tuple[int, int]]:
    table = Table("slots", "pages held", "pages without the window", title=f"sink {SINK}, window {WINDOW}")
    sizes, before = [], engine.stats().pages_held
    async with engine.context() as ctx:
        ctx.fill(PROMPT)
        size, kept = ctx.page_size, SINK // ctx.page_size  # pages up to `kept` stay
        discarded = kept
        for step in range(NEW_TOKENS):
            fwd = ctx.forward().attention_mask(Mask.sink(SINK, WINDOW))
            chosen = fwd.sample([-1], SAMPLER)
            ctx.fill([(await fwd.execute()).token(chosen)])
            unseen = (ctx.seq_len + 1 - WINDOW) // size  # the next row's window starts in this page
            if unseen > discarded:
                ctx.inner().discard_pages(discarded, unseen - discarded)
                discarded = unseen
            held = engine.stats().pages_held - before
            sizes.append((ctx.seq_len, held))
            if step % 12 == 0 or step == NEW_TOKENS - 1:
                table.add_row(str(ctx.seq_len), str(held), str(-(-ctx.seq_len // size)))
        Console().print(table)
        print(engine.tokenizer.decode(ctx.tokens))
    return sizes


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
