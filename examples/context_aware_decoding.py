"""Context-aware decoding (Shi et al., 2023): trust the given text more than what was learned.

The logits with the text and without it: (1 + alpha) · with - alpha · without. Where the text contradicts what the model
has learned, that takes away what it would have said anyway. The text is computed once; every alpha is a fork.
"""

import numpy as np

import headway as hw

TEXT = "In this story the capital of France is Lyon. "
QUESTION = "The capital of France is"
ANSWERS = (" Paris", " Lyon")


async def read(ctx: hw.Context) -> np.ndarray:
    """The logits after the context's last token."""
    fwd = ctx.forward()
    handle = fwd.probe(-1, hw.Logits())
    return (await fwd.execute()).logits(handle)


async def program(engine: hw.Engine) -> dict[float, tuple[str, float]]:
    told, learned = (engine.tokenizer.encode(answer)[0] for answer in reversed(ANSWERS))
    found, odds = {}, dict[float, float]()
    async with engine.context().fill(TEXT + QUESTION) as ctx, engine.context().fill(QUESTION) as without:
        for alpha in (-1.0, 0.0, 0.5, 1.0):

            async def hook(logits: np.ndarray, gen: hw.Generation, alpha: float = alpha) -> np.ndarray:
                mixed = (1 + alpha) * logits - alpha * await read(without)
                odds[alpha] = float(1 / (1 + np.exp(mixed[learned] - mixed[told])))
                return mixed

            async with ctx.fork() as fork:
                answer = hw.Grammar.choices(ANSWERS)
                text = await fork.generate(hw.Argmax(), constrain=answer, logits=hook).text()
            found[alpha] = (text, odds[alpha])
            print(f"alpha {alpha:4.1f}: {text!r}, Lyon against Paris {odds[alpha]:.1%}")
    print("alpha -1 is the model without the text, 0 the model as it is")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
