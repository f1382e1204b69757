"""Several documents in position spaces of their own: no document comes first.

All documents start at the same position and do not see each other; the question follows at the position after the
longest. Their order in memory then means nothing: the answer is the same, to float rounding, whichever comes first.
"""

from itertools import chain, permutations

import numpy as np
from rich.console import Console
from rich.table import Table

import headway as hw
from headway import Distribution, Logits, Mask

DOCUMENTS = [
    "Anna has a red bicycle and lives by the sea.\n",
    "Boris has a blue boat and lives on an island.\n",
    "Clara has a green tractor and lives on a farm.\n",
]
QUESTION = "The color of the boat is"


async def ask(engine: hw.Engine, documents: tuple[str, ...], *, own: bool) -> tuple[np.ndarray, str]:
    """The logits behind the question, and the likeliest answer."""
    ids = [engine.tokenizer.encode(text) for text in documents]
    question = engine.tokenizer.encode(QUESTION)
    async with engine.context() as ctx:
        fwd = ctx.forward()
        if own:
            fwd.input_at(chain(*ids), chain(*(range(len(part)) for part in ids)))
            fwd.attention_mask(Mask.blocks([len(part) for part in ids]))
        else:
            fwd.input(chain(*ids))
        fwd.input(question)  # at the largest position so far + 1, in the open block that sees every document
        logits, top = fwd.probe(-1, Logits()), fwd.probe(-1, Distribution(k=1))
        out = await fwd.execute()
    best, p = out.distribution(top)
    return out.logits(logits), f"{engine.tokenizer.decode(best)} ({p[0]:.0%})"


async def program(engine: hw.Engine) -> dict[str, float]:
    spread = {}
    for name, own in [("one after the other", False), ("position spaces of their own", True)]:
        table = Table("order of the documents", "answer", title=f"{name}: {QUESTION} …")
        rows = []
        for order in list(permutations(DOCUMENTS))[:3]:
            logits, answer = await ask(engine, order, own=own)
            rows.append(logits)
            table.add_row(", ".join(text.split()[0] for text in order), answer)
        Console().print(table)
        spread[name] = float(np.ptp(rows, axis=0).max())
        print(f"largest difference of a logit between two orders: {spread[name]:.6f}\n")
    return spread


if __name__ == "__main__":
    hw.Engine("smollm2", dtype="float32").run(program)  # packed weights round, which magnifies small differences
