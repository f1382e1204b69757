"""The logit lens: what the model would say if it ended after each layer, read in one pass."""

from rich.console import Console
from rich.table import Table

import headway as hw
from headway import LogitLens

PROMPT = "The Eiffel Tower is in the city of"


async def program(engine: hw.Engine) -> list[str]:
    layers = [
        0,
        *range(6, 24, 6),
        *range(24, engine.config.layers + 1),
    ]  # 0 is the embedding, the last is the model's own answer
    async with engine.context() as ctx:
        ctx.fill(PROMPT)
        fwd = ctx.forward()
        handle = fwd.probe(-1, LogitLens(layers, k=3))
        out = await fwd.execute()
    table = Table("after layer", "likeliest", "p", "", "then", title=f"{PROMPT} …")
    favorites = []
    for layer, (ids, probs) in zip(layers, out.lens(handle)):
        best, *rest = (repr(engine.tokenizer.decode([token])) for token in ids)
        table.add_row(str(layer), best, f"{probs[0]:.1%}", "█" * round(10 * probs[0]), " ".join(rest))
        favorites.append(engine.tokenizer.decode([ids[0]]))
    Console().print(table)
    return favorites


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
