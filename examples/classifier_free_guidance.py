"""Classifier-free guidance (Sanchez et al., 2023): more of what the instruction asks for, less of what comes anyway.

A second context writes the same text without the instruction. Each draw is from plain + scale · (instructed - plain),
the logits of both: scale 1 is ordinary generation. The `logits` hook makes the second context follow; sampler, stops
and seeds stay those of `generate`.
"""

import numpy as np

import headway as hw

NEW_TOKENS = 24
INSTRUCTION = "The mood of this story is dark and sad.\n"
PROMPT = "The children went down to the river. It was"


async def guided(ctx: hw.Context, without: hw.Context, scale: float, sampler: hw.Sampler, max_tokens: int) -> list[int]:
    """The tokens of a generation that is led away from what the second context would say."""

    async def guide(instructed: np.ndarray, gen: hw.Generation) -> np.ndarray:
        fwd = without.fill(gen.generated[-1:]).forward()
        handle = fwd.probe(-1, hw.Logits())
        plain = (await fwd.execute()).logits(handle)
        return plain + scale * (instructed - plain)

    return await ctx.generate(sampler, max_tokens=max_tokens, logits=guide).tokens()


async def program(engine: hw.Engine) -> dict[float, str]:
    found = {}
    before = engine.stats().passes
    for scale in (0.0, 1.0, 2.0):
        async with engine.context().fill(INSTRUCTION + PROMPT) as ctx, engine.context().fill(PROMPT) as without:
            tokens = await guided(ctx, without, scale, hw.Argmax(), NEW_TOKENS)
        found[scale] = engine.tokenizer.decode(tokens)
        print(f"scale {scale:.0f}: {found[scale]!r}")
    passes = engine.stats().passes - before
    print(f"{passes} passes for {len(found) * NEW_TOKENS} tokens: two a token, each over one new token")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
