"""Contrastive decoding (Li et al., 2022): keep what an expert knows and an amateur does not.

The token is the one whose probability rises most from the amateur to the expert, among those that the expert finds
plausible: at least ALPHA times as likely as its favorite. The amateur here is the paper's cheap one, the same model
that sees the text only from the last token of the prompt on; any other engine with the same tokens would do.
"""

from itertools import pairwise

import numpy as np

import headway as hw

ALPHA, NEW_TOKENS = 0.1, 48
PROMPT = "A traveler asked the old woman about the road over the mountains. She said that"


def contrast(expert: np.ndarray, amateur: np.ndarray) -> np.ndarray:
    """The scores of both, as log-probabilities up to a constant; -inf where the expert finds a token implausible."""
    return np.where(expert >= expert.max() + np.log(ALPHA), expert - amateur, -np.inf)


def repeated(tokens: list[int]) -> float:
    """The share of token pairs that came before."""
    pairs = list(pairwise(tokens))
    return 1 - len(set(pairs)) / len(pairs)


async def program(engine: hw.Engine) -> dict[str, list[int]]:
    prompt = engine.tokenizer.encode(PROMPT)
    async with engine.context().fill(prompt) as ctx:
        found = {"greedy": await ctx.generate(hw.Argmax(), max_tokens=NEW_TOKENS).tokens()}
    async with engine.context().fill(prompt) as ctx, engine.context().fill(prompt[-1:]) as amateur:

        async def hook(expert: np.ndarray, gen: hw.Generation) -> np.ndarray:
            fwd = amateur.fill(gen.generated[-1:]).forward()
            handle = fwd.probe(-1, hw.Logits())
            return contrast(expert, (await fwd.execute()).logits(handle))

        found["contrastive"] = await ctx.generate(hw.Argmax(), max_tokens=NEW_TOKENS, logits=hook).tokens()
    for name, tokens in found.items():
        print(f"{name}: {engine.tokenizer.decode(tokens)!r}")
    print(", ".join(f"{name}: {repeated(tokens):.0%} of token pairs repeated" for name, tokens in found.items()))
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
