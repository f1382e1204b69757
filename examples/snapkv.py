"""SnapKV (Li et al., 2024): before the first token is written, keep only what the question looks at.

The last tokens of a prompt, the question, vote by their attention for the slots that matter; a vote counts for its
neighborhood too, so that whole phrases survive. Those slots and the question stay, at their positions, `keep_slots`
frees the rest, and every later token is computed over a fraction of the prompt. As in the paper, but for all heads and
layers together.
"""

import numpy as np

import headway as hw

KEEP, KERNEL, NEW_TOKENS = 48, 7, 12
FILLER = "The museum is open from Tuesday to Sunday and closed on public holidays. Tickets are sold at the entrance. "
STORY = FILLER * 4 + "The password of the archive is marigold. " + FILLER * 4
QUESTION = "As we said above, the password of the archive is"


async def votes(ctx: hw.Context, question: list[int]) -> np.ndarray:
    """How much the question's rows attend to each slot before it, summed, and spread over neighbors."""
    fwd = ctx.forward().input(question)
    layers = range(ctx.engine.config.layers // 2, ctx.engine.config.layers)
    handles = [fwd.probe(row, hw.AttentionScores(layer, "mean")) for row in range(len(question)) for layer in layers]
    out = await fwd.execute()
    slots = ctx.seq_len - len(question)
    total = np.sum([out.attention(handle)[:slots] for handle in handles], axis=0)
    padded = np.pad(total, KERNEL // 2)
    return np.lib.stride_tricks.sliding_window_view(padded, KERNEL).max(axis=1)


async def program(engine: hw.Engine) -> dict[str, tuple[str, int, int]]:
    found = {}
    question = engine.tokenizer.encode(QUESTION)
    for name in ("everything", "what the question looks at", "the end only"):
        async with engine.context().fill(STORY) as ctx:
            scores = await votes(ctx, question)
            before = len(ctx.inner().pages)
            best = np.argsort(-scores)[:KEEP] if name.startswith("what") else np.arange(len(scores))[-KEEP:]
            if name != "everything":
                ctx.inner().keep_slots([*np.sort(best).tolist(), *range(len(scores), ctx.seq_len)], start=0)
            text = await ctx.generate(hw.Argmax(), max_tokens=NEW_TOKENS, stop=".").text()
            found[name] = (text, before, len(ctx.inner().pages))
            print(f"{name}: {ctx.seq_len} slots, {found[name][2]} pages of {before}: …{text!r}")
    _, all_pages, few = found["what the question looks at"]
    print(f"{few} pages instead of {all_pages} for every token that follows, and the password is still there")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
