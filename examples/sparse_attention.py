"""Page-aligned sparse attention: find the pages that matter, and leave the others out of the attention call.

One look with `AttentionScores` says how much the question's last token attends to each page. Decoding then masks the
other pages whole, in every row, so that page-trim drops them: the text is nearly the same from fewer pages.
"""

import numpy as np
from rich.console import Console
from rich.table import Table

import headway as hw
from headway import Argmax, AttentionScores, Mask

KEEP, NEW_TOKENS = 4, 12
FILLER = "The museum is open from Tuesday to Sunday and closed on public holidays. Tickets are sold at the entrance. "
FACT = "The password of the archive is marigold. "
STORY = FILLER * 4 + FACT + FILLER * 4
QUESTION = "As we said above, the password of the archive is"


async def page_scores(ctx: hw.Context, layers: range) -> np.ndarray:
    """How much the context's last token attends to each page, summed over heads and layers."""
    fwd = ctx.forward()
    handles = [fwd.probe(-1, AttentionScores(layer)) for layer in layers]
    out = await fwd.execute()
    slots = np.sum([out.attention(h).sum(axis=0) for h in handles], axis=0)
    return np.add.reduceat(slots, range(0, len(slots), ctx.page_size))


async def decode(ctx: hw.Context, pages: np.ndarray) -> tuple[list[int], float]:
    """Greedy tokens that see only these pages and what follows them, and the mean number of pages trimmed."""
    start, tokens, trimmed = ctx.seq_len - 1, [ctx.tokens[-1]], []
    ctx.truncate(1)  # the last token of the question is fed again, under the mask
    while len(tokens) <= NEW_TOKENS:
        attend = np.isin(np.arange(ctx.seq_len) // ctx.page_size, pages)
        attend[start:] = True  # its own tokens
        fwd = ctx.forward().input(tokens[-1:]).attention_mask(Mask.from_bool(attend))
        chosen = fwd.sample([-1], Argmax())
        out = await fwd.execute()
        tokens.append(out.token(chosen))
        trimmed.append(out.stats.pages_trimmed)
    return tokens[1:], float(np.mean(trimmed))


async def program(engine: hw.Engine) -> dict[str, tuple[str, float]]:
    async with engine.context() as ctx:
        await ctx.fill(STORY + QUESTION).flush()
        scores = await page_scores(ctx, range(engine.config.layers // 2, engine.config.layers))
        everything, last = np.arange(len(scores)), len(scores) - 1
        best = np.union1d([0, last - 1, last], np.argsort(-scores)[:KEEP])
        found = {}
        table = Table("pages attended", "continuation", "pages trimmed a step", title=f"… {QUESTION}")
        for name, pages in [("all", everything), ("best", best), ("ends", np.array([0, last - 1, last]))]:
            tokens, trimmed = await decode(ctx.fork(), pages)
            found[name] = (engine.tokenizer.decode(tokens), trimmed)
            table.add_row(f"{name}: {len(pages)} of {len(scores)}", repr(found[name][0]), f"{trimmed:.0f}")
        Console().print(table)
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
