"""DoLa (Chuang et al., 2024): what the last layer knows and an early layer does not, by two hooks of a generation.

Before every pass one hook adds a logit lens at the early layers; before every draw another subtracts the early layer
that differs most from the last one. The rest (filters, seeds, stops, the batch) is the generation's own.
"""

import numpy as np

import headway as hw
from headway import Argmax, LogitLens

PROMPT = "On which continent is Egypt? Egypt is in"
RELATIVE_TOP = 0.1  # of the likeliest token's probability: less likely ones are out


class Dola:
    """The hooks, and which layer was chosen for each token."""

    def __init__(self, layers: list[int]) -> None:
        self.layers, self.chosen = layers, []

    def prepare(self, prepared: hw.Prepared) -> None:
        self.forward = prepared.forward
        self.lens = prepared.forward.probe(-1, LogitLens(self.layers, 0))

    def logits(self, logits: np.ndarray, gen: hw.Generation) -> np.ndarray:
        early = [scattered(ids, probs) for ids, probs in self.forward.output.lens(self.lens)]
        best, contrasted = contrast(log_softmax(logits), early)
        self.chosen.append(self.layers[best])
        return contrasted


def contrast(final: np.ndarray, early: list[np.ndarray]) -> tuple[int, np.ndarray]:
    """Which of the early log-probabilities differs most from the final ones, and the difference as logits."""
    best = int(np.argmax([divergence(np.exp(final), np.exp(one)) for one in early]))
    return best, np.where(final >= final.max() + np.log(RELATIVE_TOP), final - early[best], -np.inf)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max()
    return wide - np.log(np.exp(wide).sum())


def scattered(ids: np.ndarray, probs: np.ndarray) -> np.ndarray:
    """Log-probabilities in the order of token ids."""
    found = np.empty(len(ids))
    found[ids] = np.log(np.maximum(probs.astype(np.float64), 1e-30))
    return found


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Jensen–Shannon."""
    m = (p + q) / 2
    return float(sum((a * np.log(np.maximum(a, 1e-30) / m)).sum() for a in (p, q)) / 2)


async def program(engine: hw.Engine) -> tuple[list[int], list[int]]:
    dola = Dola([*range(2, engine.config.layers // 2, 2)])
    async with engine.context() as ctx:
        plain = await ctx.fill(PROMPT).generate(Argmax(), max_tokens=8).text()
    async with engine.context() as ctx:
        before = engine.stats().passes
        gen = ctx.fill(PROMPT).generate(Argmax(), max_tokens=8, prepare=dola.prepare, logits=dola.logits)
        text = await gen.text()
        passes = engine.stats().passes - before
    print(f"greedy: {plain!r}")
    print(f"DoLa:   {text!r}")
    print("contrasted with layers", sorted(set(dola.chosen)))
    print(f"{len(gen.generated)} tokens and {gen.finish!r} in {passes} passes, which read the early layers too")
    return list(gen.generated), dola.chosen


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
