"""Two competing drafts at one position, judged in one pass that reads the context once.

Both drafts start at the position after the prompt and are masked so that neither sees the other; each row's answer is
then what it would be alone, which the example checks with forks. The loser leaves no slot behind.
"""

import numpy as np

import headway as hw
from headway import Logits, Logprob, Mask

PROMPT = "The recipe says: bake the bread in a hot"
DRAFTS = [" oven for an hour", " bath for an hour"]


async def alone(ctx: hw.Context, ids: list[int]) -> np.ndarray:
    """The logits behind one draft in a context of its own."""
    fwd = ctx.forward().input(ids)
    last = fwd.probe(-1, Logits())
    return (await fwd.execute()).logits(last)


async def program(engine: hw.Engine) -> tuple[list[float], float]:
    first, second = (engine.tokenizer.encode(text) for text in DRAFTS)
    a, b = len(first), len(second)
    async with engine.context() as ctx:
        await ctx.fill(PROMPT).flush()
        n = ctx.seq_len
        checks = [await alone(ctx.fork(), ids) for ids in (first, second)]

        rows = [[n + i] for i in range(a)]  # zeros first, 0 = attend: all slots before the row
        rows += [[n, a, i] for i in range(b)]  # the prompt, not the first draft, then its own draft
        fwd = ctx.forward().attention_mask(rows)
        fwd.input_at([*first, *second], [*range(n, n + a), *range(n, n + b)])
        starts = [fwd.probe(-(a + b + 1), Logprob(ids[0])) for ids in (first, second)]
        scores = [[fwd.probe(i, Logprob(token)) for i, token in enumerate(first[1:])]]
        scores += [[fwd.probe(a + i, Logprob(token)) for i, token in enumerate(second[1:])]]
        ends = [fwd.probe(a - 1, Logits()), fwd.probe(a + b - 1, Logits())]
        out = await fwd.execute()

        print("a prompt in slots 0–2, one draft in 3–4, the other in 5–6:")
        print(Mask.from_runs([[3], [4], [3, 2], [3, 2, 1]]).picture(3, 4))
        totals = [sum(float(out.logprobs(h)[0]) for h in (s, *rest)) for s, rest in zip(starts, scores)]
        for text, total in zip(DRAFTS, totals):
            print(f"log p({text!r}) = {total:.2f}")
        apart = max(float(np.abs(out.logits(h) - check).max()) for h, check in zip(ends, checks))
        print(f"largest difference of a logit from each draft alone: {apart:.6f}")

        winner = max(zip(totals, (first, second)))[1]
        ctx.truncate(a + b).fill(winner)
        print(f"kept {engine.tokenizer.decode(winner)!r}; the context has {len(ctx.tokens)} tokens")
    return totals, apart


if __name__ == "__main__":
    hw.Engine("smollm2", dtype="float32").run(program)  # packed weights round, which magnifies small differences
