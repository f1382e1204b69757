"""A verifier with rewind: what Python finds wrong is cut off again, and only that is tried once more.

Each line is checked as soon as it is there. A wrong one is truncated, back to the end of the last good line, and drawn
with another seed; keys and values of all that was right stay. Whoever starts over instead reads all of that again: as
a check, the example does so, in contexts that share nothing, and counts.
"""

import re

import headway as hw

PROMPT = "12 + 5 = 17\n31 + 4 = 35\n24 + 3 = 27\n"
LINE = hw.Grammar.regex(r"[1-9][0-9] \+ [1-9] = [1-9][0-9]\n")
LINES, MISTAKES = 6, 20


def right(line: str, before: list[str]) -> bool:
    """Whether a sum is correct and new."""
    a, b, total = map(int, re.findall(r"\d+", line))
    return a + b == total and line not in before


async def write(ctx: hw.Context) -> tuple[list[str], list[str], list[tuple[int, ...]]]:
    """The lines that were right, those that were not, and what stood before each of these."""
    good, bad, kept = [], [], []
    while len(good) < LINES and len(bad) < MISTAKES:
        checkpoint = ctx.tokens
        sampler = hw.Multinomial(temperature=1.0, seed=len(good) + len(bad))
        line = (await ctx.generate(sampler, max_tokens=16, constrain=LINE).text()).strip()
        if right(line, good):
            good.append(line)
        else:
            bad.append(line)
            kept.append(checkpoint)
            ctx.truncate(len(ctx.tokens) - len(checkpoint))
    return good, bad, kept


async def program(engine: hw.Engine) -> tuple[list[str], list[str], int, int]:
    start = engine.stats().tokens
    async with engine.context(salt="rewind").fill(PROMPT) as ctx:
        good, bad, kept = await write(ctx)
    middle = engine.stats().tokens
    for number, tokens in enumerate(kept):
        async with engine.context(salt=f"over {number}") as ctx:  # a salt of its own: the cache cannot help
            await ctx.fill(tokens).flush()
    computed, again = middle - start, engine.stats().tokens - middle
    print(f"right: {', '.join(good)}\ncut off: {', '.join(bad)}")
    print(f"{len(bad)} rewinds, {computed} tokens computed; starting over each time: {computed + again}")
    return good, bad, computed, again


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
