"""A verifier with rewind: what Python finds wrong is cut off again, and only that is tried once more.

Each line is checked as soon as it is there. A wrong one is truncated, back to the end of the last good line, and drawn
with another seed; keys and values of all that was right stay. Against it, the same seeds with a new context for every
try: the same lines, at the price of reading everything before them again.
"""

import re

import headway as hw

PROMPT = "12 + 5 = 17\n31 + 4 = 35\n24 + 3 = 27\n"
LINE = hw.Grammar.regex(r"[1-9][0-9] \+ [1-9] = [1-9][0-9]\n")
LINES, MISTAKES = 5, 12


def right(line: str) -> bool:
    a, b, total = map(int, re.findall(r"\d+", line))
    return a + b == total


async def write(engine: hw.Engine, *, rewind: bool) -> tuple[list[str], list[str], int]:
    """The lines that were right, those that were not, and how many tokens were computed."""
    before, good, bad = engine.stats().tokens, [], []
    ctx = engine.context(salt=f"sums {rewind}").fill(PROMPT)
    while len(good) < LINES and len(bad) < MISTAKES:
        checkpoint = len(ctx.tokens)
        sampler = hw.Multinomial(temperature=0.8, seed=len(good) + len(bad))
        line = await ctx.generate(sampler, max_tokens=16, constrain=LINE).text()
        (good if right(line) else bad).append(line.strip())
        if not right(line) and rewind:
            ctx.truncate(len(ctx.tokens) - checkpoint)
        elif not right(line):
            tokens = ctx.tokens[:checkpoint]
            ctx.release()
            ctx = engine.context(salt=f"try {len(bad)}").fill(tokens)  # a salt of its own: the cache cannot help
    ctx.release()
    return good, bad, engine.stats().tokens - before


async def program(engine: hw.Engine) -> tuple[list[str], list[str], int, int]:
    good, bad, tokens = await write(engine, rewind=True)
    again, _, more = await write(engine, rewind=False)
    print(f"right: {', '.join(good)}\ncut off: {', '.join(bad)}")
    print(f"{len(bad)} rewinds: {tokens} tokens computed; starting over each time: {more}, {more - tokens} more")
    assert good == again, "a draw depends on the seed and the position alone"
    return good, bad, tokens, more


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
