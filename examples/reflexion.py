"""Reflexion (Shinn et al., 2023): try, hear in words what was wrong, and try again with that in mind.

A checker in Python says why an answer fails; the sentence goes into the context behind the attempt, and the next one
is drawn after it. Nothing is trained, and nothing is computed again: each trial adds its own few tokens to the pages
that are there.
"""

import headway as hw

TRIALS = 8
COLORS = {"white", "black", "yellow", "purple", "orange", "pink", "brown", "gray", "silver", "gold"}
TAKEN = {"red", "blue", "green"}
PROMPT = """Name a fruit.
Attempt: apple
Reflection: no, "apple" is taken.
Attempt: plum
Reflection: right!

Name a color.
"""


def reflect(word: str) -> str:
    if word in COLORS:
        return "right!"
    return f'no, "{word}" {"is taken" if word in TAKEN else "is not a color"}.'


async def program(engine: hw.Engine) -> tuple[list[str], int, int]:
    tried: list[str] = []
    before, apart = engine.stats().tokens, 0
    async with engine.context(salt="reflexion").fill(PROMPT) as ctx:
        for trial in range(TRIALS):
            word = hw.Grammar.regex(" [a-z]{3,9}\\n")
            gen = ctx.fill("Attempt:").generate(hw.Multinomial(0.5, seed=trial), constrain=word)
            tried.append((await gen.text()).strip())
            apart += len(ctx.tokens)
            ctx.fill(f"Reflection: {reflect(tried[-1])}\n")
            print(f"{tried[-1]}: {reflect(tried[-1])}")
            if reflect(tried[-1]) == "right!":
                break
    tokens = engine.stats().tokens - before
    print(f"{tokens} tokens computed; reading everything again for each trial {apart}")
    return tried, tokens, apart


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
