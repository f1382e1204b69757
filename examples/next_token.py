"""The next-token table: what the model would say next, and how sure it is, without choosing anything."""

from rich.console import Console
from rich.table import Table

import headway as hw

PROMPTS = ["Kubernetes pods are scheduled by the", "The capital of France is", "Twinkle, twinkle, little"]


async def program(engine: hw.Engine) -> dict[str, str]:
    favorites = {}
    for prompt in PROMPTS:
        async with engine.context() as ctx:
            ctx.fill(prompt)
            fwd = ctx.forward()
            top = fwd.probe(-1, hw.Distribution(k=8))  # -1: the last token of the context
            entropy = fwd.probe(-1, hw.Entropy())
            out = await fwd.execute()
        ids, probs = out.distribution(top)
        table = Table("token", "probability", "", title=f"{prompt} …  ({out.entropy(entropy):.2f} nats)")
        for token, p in zip(ids, probs):
            table.add_row(repr(engine.tokenizer.decode([token])), f"{p:.1%}", "█" * round(40 * p))
        Console().print(table)
        favorites[prompt] = engine.tokenizer.decode([ids[0]])
    return favorites


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
