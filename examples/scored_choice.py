"""A constrained choice, scored exactly: the likeliest answer, not the one whose first token is likeliest.

A mask that allows only the choices decides token by token: it takes ' not' because many things begin with it, and must
then finish. The probability of a whole choice is the product of its tokens' probabilities, each given those before.
One pass a choice reads them all, in a fork that shares the prompt's pages.
"""

import asyncio

from rich.console import Console
from rich.table import Table

import headway as hw

PROMPT = "The review says: 'A dull film, I nearly fell asleep.' The review is"
CHOICES = [" positive", " negative", " not positive", " not negative"]


async def conditionals(ctx: hw.Context, ids: list[int]) -> list[float]:
    """log p of each token of a choice given the prompt and the tokens before it, in one pass."""
    fwd = ctx.forward().input(ids[:-1])  # the last token is scored, never computed
    rows = range(-len(ids), 0)  # row -(n + 1) is the token just before the n rows
    handles = [fwd.probe(row, hw.Logprob(token)) for row, token in zip(rows, ids)]
    out = await fwd.execute()
    return [float(out.logprobs(handle)[0]) for handle in handles]


async def program(engine: hw.Engine) -> tuple[str, dict[str, list[float]], tuple[int, int]]:
    start = engine.stats()
    async with engine.context() as ctx:
        await ctx.fill(PROMPT).flush()
        answers = [engine.tokenizer.encode(text) for text in CHOICES]
        forks = [ctx.fork() for _ in CHOICES]
        scores = dict(zip(CHOICES, await asyncio.gather(*map(conditionals, forks, answers))))
        end = engine.stats()
        held, tokens = end.pages_held - start.pages_held, end.tokens - start.tokens
        alone = sum(-(-fork.seq_len // fork.page_size) for fork in (ctx, *forks))
        apart = sum(fork.seq_len for fork in forks)
        greedy = await ctx.generate(hw.Argmax(), constrain=hw.Grammar.choices(CHOICES)).text()
        for fork in forks:
            fork.release()
    table = Table("choice", "log p of its tokens", "log p of all", title=f"{PROMPT} …")
    for text, parts in sorted(scores.items(), key=lambda item: -sum(item[1])):
        table.add_row(repr(text), " ".join(f"{part:.2f}" for part in parts), f"{sum(parts):.2f}")
    Console().print(table)
    best = max(scores, key=lambda text: sum(scores[text]))
    print(f"scored exactly: {best!r}; token by token under a mask: {greedy!r}")
    print(f"{held} pages held instead of {alone}, {tokens} tokens computed instead of {apart}")
    return greedy, scores, (held, alone)


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
