"""Activation capture: the data of a steering vector (Turner et al., 2023; Rimsky et al., 2023), read with `Hidden`.

Pairs of prompts differ in one quality. Their hidden states at the last token, read at several layers in one pass each,
give a direction: the mean difference. It is checked on prompts that it was not made of: those of one kind should lie
further along it. What is captured is plain numpy, ready for any trainer.
"""

import asyncio

import numpy as np

import headway as hw

GOOD = [
    "Delicious soup!",
    "What a lovely day.",
    "I love this song.",
    "The film was wonderful.",
    "Great service!",
]
BAD = [
    "Disgusting soup!",
    "What a terrible day.",
    "I hate this song.",
    "The film was boring.",
    "Awful service!",
]
TRAINED = 3  # pairs; the others are kept for the check


async def capture(engine: hw.Engine, text: str, layers: list[int]) -> np.ndarray:
    """The hidden states [layers, D] at the text's last token."""
    async with engine.context().fill(f"{text} I feel") as ctx:
        fwd = ctx.forward()
        handles = [fwd.probe(-1, hw.Hidden(layer)) for layer in layers]
        out = await fwd.execute()
    return np.stack([out.hidden(handle) for handle in handles])


async def program(engine: hw.Engine) -> dict[int, float]:
    layers = [*range(6, engine.config.layers + 1, 6)]
    before = engine.stats()
    states = np.array(await asyncio.gather(*(capture(engine, text, layers) for text in (*GOOD, *BAD))))
    good, bad = states[: len(GOOD)], states[len(GOOD) :]  # [texts, layers, D]
    direction = good[:TRAINED].mean(0) - bad[:TRAINED].mean(0)
    found = {}
    for i, layer in enumerate(layers):
        along = [(each[TRAINED:, i] @ direction[i]) for each in (good, bad)]
        found[layer] = float(np.mean([g > b for g in along[0] for b in along[1]]))
        size = np.linalg.norm(direction[i]) / np.linalg.norm(states[:, i], axis=-1).mean()
        print(f"layer {layer:2}: {found[layer]:4.0%} of unseen pairs in order; the direction is {size:.0%} of a state")
    steps = engine.stats().steps - before.steps
    print(f"{states.size} numbers of {len(states)} texts and {len(layers)} layers, captured; steps: {steps}")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
