"""A watermark that changes no probability (Aaronson, 2022), and its detector.

The likeliest token after adding Gumbel noise to the logits is an exact draw from the model's distribution. Here the
noise is a function of a key and the last tokens: each text is an ordinary draw to everybody else, and whoever has the
key sees that its tokens had suspiciously high random numbers. Bias and `Argmax` do it on the device.
"""

import math

import numpy as np

import headway as hw

KEY, WIDTH, NEW_TOKENS = 7, 3, 60
PROMPT = "My grandmother's kitchen was"


def uniform(previous: tuple[int, ...], vocab: int) -> np.ndarray:
    """A random number [V] for each token, from the key and the tokens before it."""
    return np.random.default_rng((KEY, *previous)).random(vocab)


def p_value(tokens: list[int], vocab: int) -> float:
    """How likely an unmarked text would score so high: the sum of -log(1 - u) of n draws is a Gamma(n) variable."""
    places = {tuple(tokens[i - WIDTH : i + 1]) for i in range(WIDTH, len(tokens))}  # each once
    total = sum(-math.log1p(-uniform(place[:-1], vocab)[place[-1]]) for place in places)
    # P(Gamma(n) > x) = sum over k < n of e^-x x^k / k!
    return sum(math.exp(k * math.log(total) - total - math.lgamma(k + 1)) for k in range(len(places)))


async def program(engine: hw.Engine) -> dict[str, float]:
    values = {}
    for name in ("plain", "marked"):
        async with engine.context().fill(PROMPT) as ctx:

            def mark(prepared: hw.Prepared, ctx: hw.Context = ctx) -> None:
                noise = uniform(ctx.tokens[-WIDTH:], engine.vocab_size)
                prepared.forward.bias(-np.log(-np.log(noise)))

            if name == "marked":
                gen = ctx.generate(hw.Argmax(), max_tokens=NEW_TOKENS, prepare=mark)
            else:
                gen = ctx.generate(hw.Multinomial(seed=5), max_tokens=NEW_TOKENS)
            text = await gen.text()
        values[name] = p_value(list(gen.generated), engine.vocab_size)
        print(f"{name}: {text!r}\n  p = {values[name]:.2g}")
    print("a small p is a mark; nobody without the key can tell the two texts apart")
    return values


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
