"""H2O (Zhang et al., 2023): forget the tokens that nobody looks at, and give their memory back.

A few tokens get most of the attention. While the text grows, the scores of every row are added up for each slot; when
the context passes its budget, the slots with the highest sums (heavy hitters) and the latest stay, at their positions,
and `keep_slots` frees the pages of the rest. As in the paper, but for all heads and layers together.
"""

import numpy as np

import headway as hw

BUDGET, RECENT, NEW_TOKENS = 48, 16, 64
PROMPT = "The tale of the old clockmaker and his three apprentices begins on a cold winter morning in a small town."


async def write(ctx: hw.Context, budget: int | None) -> tuple[list[int], int, int]:
    """A continuation within a budget of slots, the most pages it held, and the number of evictions."""
    layers = range(5, ctx.engine.config.layers, 10)
    scores, tokens, pages, evictions = np.zeros(0), [], 0, 0
    probes = [hw.AttentionScores(layer, reduce="mean") for layer in layers]
    async for step in ctx.generate(hw.Argmax(), max_tokens=NEW_TOKENS, probe=probes, stop_only=True):
        for rows in step.probes:
            seen = np.sum(rows, axis=0)
            scores = np.pad(scores, (0, len(seen) - len(scores))) + seen
        tokens += step.tokens
        pages = max(pages, sum(page.state != "discarded" for page in ctx.inner().pages))
        if budget is not None and ctx.seq_len > budget:
            old = np.argsort(-scores[:-RECENT])[: budget // 2 - RECENT // 2]
            kept = np.sort([*old, *range(len(scores) - RECENT, len(scores))])
            ctx.inner().keep_slots(kept.tolist(), start=0)
            scores, evictions = scores[kept], evictions + 1
    return tokens, pages, evictions


async def program(engine: hw.Engine) -> dict[str, tuple[list[int], int, int]]:
    found = {}
    for name, budget in {"all slots": None, f"at most {BUDGET}": BUDGET}.items():
        async with engine.context().fill(PROMPT) as ctx:
            found[name] = await write(ctx, budget)
            tokens, pages, evictions = found[name]
            print(f"{name}: {engine.tokenizer.decode(tokens)!r}")
            print(f"  {ctx.next_position} positions, {ctx.seq_len} slots, {pages} pages at most, {evictions} evictions")
    (plain, full, _), (tokens, small, _) = found.values()
    same = next((i for i, pair in enumerate(zip(plain, tokens)) if pair[0] != pair[1]), len(plain))
    print(f"{small} pages instead of {full}; the first {same} tokens are the same")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
