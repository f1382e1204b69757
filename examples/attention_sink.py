"""The attention sink: four first tokens, kept in sight, rescue a sliding window.

Models park spare attention on the first tokens of a text. A window that slides past them takes that place away and
the model loses the thread; the same number of slots with the first four among them reads almost as well as all.
"""

import math

from rich.console import Console
from rich.table import Table

import headway as hw
from headway import Logprob, Mask

SIZES = [48, 24]
TEXT = (
    "The lighthouse at Marrow Point was built in 1871 by a crew of forty men, most of whom had never seen the sea "
    "before. They hauled the granite up from the beach on sledges, and when the winter storms came they slept in the "
    "half-finished tower, with the wind howling through the gaps in the walls. The first keeper was a widow named "
    "Agnes Tull, who lived there with her three daughters for twenty-six years. She kept a diary of the weather, the "
    "ships and the birds, and she never once let the lamp go out. When she died, her eldest daughter took over."
)


async def perplexity(engine: hw.Engine, mask: Mask) -> float:
    """How surprised the model is by each next token of the text, in one pass under the mask."""
    ids = engine.tokenizer.encode(TEXT)
    async with engine.context() as ctx:
        fwd = ctx.forward().input(ids).attention_mask(mask)
        handles = [fwd.probe(row, Logprob(token)) for row, token in enumerate(ids[1:])]
        out = await fwd.execute()
    return math.exp(-sum(float(out.logprobs(h)[0]) for h in handles) / len(handles))


async def program(engine: hw.Engine) -> dict[str, float]:
    masks = [Mask.causal()]
    for n in SIZES:
        masks += [Mask.sink(4, n - 4), Mask.window(n)]
    found = {repr(mask): await perplexity(engine, mask) for mask in masks}
    table = Table("mask", "perplexity", "", title="lower is better")
    for name, value in found.items():
        table.add_row(name, f"{value:.1f}", "█" * round(value / 2))
    Console().print(table)
    print("Mask.sink(2, 4), each row's view:", Mask.sink(2, 4).picture(0, 10), sep="\n")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
