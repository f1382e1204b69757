"""Position interpolation with whole position ids: several tokens share an id, so a text takes up fewer positions.

A model's context limit binds position ids, not slots: with two tokens to an id, twice the tokens fit under it.
It is not free. This model was never trained on repeated ids and reads worse for it, as the table shows; neighbors
that share an id can no longer be told apart by position at all. (Interpolation as it is used in training divides
positions into fractions, which keeps the order; ids are whole numbers here.) Spreading the ids out costs as well.
"""

import math
from collections.abc import Callable
from itertools import count

from rich.console import Console
from rich.table import Table

import headway as hw

TEXT = (
    "The lighthouse at Marrow Point was built in 1871 by a crew of forty men, most of whom had never seen the sea "
    "before. They hauled the granite up from the beach on sledges, and when the winter storms came they slept in the "
    "half-finished tower, with the wind howling through the gaps in the walls. The first keeper was a widow named "
    "Agnes Tull, who lived there with her three daughters for twenty-six years."
)
PLACES: dict[str, Callable[[int], int]] = {
    "i       as trained": lambda i: i,
    "i // 2  two tokens to an id": lambda i: i // 2,
    "i // 4  four tokens to an id": lambda i: i // 4,
    "i * 2   every second id": lambda i: 2 * i,
    "i * 4   every fourth id": lambda i: 4 * i,
}


async def perplexity(engine: hw.Engine, ids: list[int], positions: list[int]) -> float:
    async with engine.context() as ctx:
        fwd = ctx.forward().input_at(ids, positions)
        handles = [fwd.probe(row, hw.Logprob(token)) for row, token in enumerate(ids[1:])]
        out = await fwd.execute()
    return math.exp(-sum(float(out.logprobs(h)[0]) for h in handles) / len(handles))


async def program(engine: hw.Engine) -> dict[str, float]:
    ids, limit = engine.tokenizer.encode(TEXT), engine.config.max_positions
    table = Table("position of token i", "last id", "tokens that fit", "perplexity")
    table.title = f"{len(ids)} tokens; the limit is {limit} positions"
    found = {}
    for name, place in PLACES.items():
        positions = [place(i) for i in range(len(ids))]
        found[name] = await perplexity(engine, ids, positions)
        fits = next(i for i in count() if place(i) >= limit)
        table.add_row(name, str(positions[-1]), str(fits), f"{found[name]:.1f}")
    Console().print(table)
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
