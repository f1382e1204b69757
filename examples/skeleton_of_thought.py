"""Skeleton of thought (Ning et al., 2023): write the outline first, then all of its points at once.

The points of an outline hardly need each other. Each is expanded in a fork of the context that holds the outline, and
the forks' passes share their steps: the answer is there after the outline and the longest point, not after their sum.
"""

import asyncio

import headway as hw

POINTS, OUTLINE_TOKENS, POINT_TOKENS = 4, 12, 24
PROMPT = "How to bake a simple loaf of bread, in four short steps:\n"


async def program(engine: hw.Engine) -> tuple[list[str], list[str], int, int]:
    outline, written = [], []
    before = engine.stats().steps
    async with engine.context().fill(PROMPT) as ctx:
        for number in range(1, POINTS + 1):
            gen = ctx.fill(f"{number}.").generate(hw.Argmax(), max_tokens=OUTLINE_TOKENS, stop=["\n", "."])
            outline.append((await gen.text()).strip())
            written.append(len(gen.generated))
            ctx.fill("\n")
        await ctx.flush()

        async def expand(number: int) -> str:
            async with ctx.fork() as fork:
                fork.fill(f"\nStep {number + 1} in detail: {outline[number]}:")
                gen = fork.generate(hw.Argmax(), max_tokens=POINT_TOKENS, stop="\n")
                text = await gen.text()
                written.append(len(gen.generated))
                return text.strip()

        details = await asyncio.gather(*map(expand, range(POINTS)))
    steps = engine.stats().steps - before
    for number, (point, detail) in enumerate(zip(outline, details), 1):
        print(f"{number}. {point}: {detail}")
    print(f"{sum(written)} tokens in {steps} steps")
    return outline, list(details), sum(written), steps


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
