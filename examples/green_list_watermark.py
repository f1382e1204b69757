"""A watermark in the words (Kirchenbauer et al., 2023), and a detector that needs no model.

Before each draw the token before it seeds a list of "green" tokens, which get a small bias. Text without the mark has
about as many green tokens as chance; marked text has many more, and the z-score says how sure that is. The bias is
added on the device in the pass itself: a `prepare` hook and `bias` are all of it.
"""

import math
from itertools import pairwise

import numpy as np

import headway as hw

KEY, GREEN, BIAS, NEW_TOKENS = 42, 0.25, 3.0, 60
PROMPT = "My grandmother's kitchen was"


def green(previous: int, vocab: int) -> np.ndarray:
    """Which tokens [V] are green after a token: a quarter of them, known to whoever has the key."""
    return np.random.default_rng((KEY, previous)).random(vocab) < GREEN


def z_score(tokens: list[int], vocab: int) -> float:
    """How many standard deviations more green tokens than chance; each pair of tokens counts once."""
    pairs = set(pairwise(tokens))
    hits = sum(bool(green(previous, vocab)[token]) for previous, token in pairs)
    return (hits - GREEN * len(pairs)) / math.sqrt(len(pairs) * GREEN * (1 - GREEN))


async def program(engine: hw.Engine) -> dict[str, float]:
    scores = {}
    for name in ("plain", "marked"):
        async with engine.context().fill(PROMPT) as ctx:

            def mark(prepared: hw.Prepared, ctx: hw.Context = ctx) -> None:
                prepared.forward.bias(BIAS * green(ctx.tokens[-1], engine.vocab_size))

            hook = mark if name == "marked" else None
            gen = ctx.generate(hw.TopP(0.95, seed=5), max_tokens=NEW_TOKENS, prepare=hook)
            text = await gen.text()
        scores[name] = z_score(list(gen.generated), engine.vocab_size)
        print(f"{name}: {text!r}\n  z = {scores[name]:.1f}")
    print("above 4 a text is called marked: one plain text in 30,000 would be, too")
    return scores


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
