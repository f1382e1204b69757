"""Samplers as user code, each a few lines in a `logits` hook (mirostat, XTC and DRY are options of `generate` too).

A hook gets a row's logits and returns others, from which `generate` then draws with its own sampler and seed. Mirostat
2 (Basu et al., 2020) keeps the surprise of the text constant; top-a (BlinkDL, 2022) cuts below a share of the squared
maximum; XTC (p-e-w, 2024) drops the likeliest of several good choices; DRY (p-e-w, 2024) punishes what would prolong a
repeated sequence; EDT (Zhang et al., 2024) sets the temperature by the entropy.
"""

import numpy as np

import headway as hw

NEW_TOKENS = 32
PROMPT = "The rain falls, and the river rises. The rain falls, and the"


def chances(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - np.logaddexp.reduce(logits))


class Mirostat:
    """Cut tokens more surprising than mu; after each token move mu so that the mean surprise becomes tau (bits)."""

    tau, eta = 3.0, 0.2

    def __init__(self) -> None:
        self.mu, self.surprise, self.seen = 2 * self.tau, np.zeros(0), list[float]()

    def __call__(self, logits: np.ndarray, gen: hw.Generation) -> np.ndarray:
        if gen.generated:
            self.seen.append(float(self.surprise[gen.generated[-1]]))
            self.mu -= self.eta * (self.seen[-1] - self.tau)
        self.surprise = -np.log2(np.maximum(chances(logits), 1e-30))
        return np.where(self.surprise <= max(self.mu, self.surprise.min()), logits, -np.inf)


def top_a(logits: np.ndarray, gen: hw.Generation, a: float = 0.2) -> np.ndarray:
    return np.where(chances(logits) >= a * chances(logits).max() ** 2, logits, -np.inf)


def xtc(logits: np.ndarray, gen: hw.Generation, threshold: float = 0.1, probability: float = 0.5) -> np.ndarray:
    good = np.flatnonzero(chances(logits) >= threshold)
    if len(good) > 1 and np.random.default_rng((gen.seed, gen.context.next_position)).random() < probability:
        logits[np.delete(good, logits[good].argmin())] = -np.inf  # all but the least likely of them
    return logits


def dry(logits: np.ndarray, gen: hw.Generation, multiplier: float = 1.5, base: float = 1.75, free: int = 2) -> None:
    tokens, longest = gen.context.tokens, dict[int, int]()
    for end in range(1, len(tokens)):  # tokens[end] followed a copy of the last `length` tokens
        length = next((n for n in range(end) if tokens[end - 1 - n] != tokens[-1 - n]), end)
        longest[tokens[end]] = max(length, longest.get(tokens[end], 0))
    for token, length in longest.items():
        logits[token] -= multiplier * base ** (length - free) if length >= free else 0


def edt(logits: np.ndarray, gen: hw.Generation, highest: float = 1.2, theta: float = 0.5) -> np.ndarray:
    entropy = -chances(logits) @ np.log(np.maximum(chances(logits), 1e-30))
    return logits / (highest * 0.8 ** (theta / max(entropy, 1e-6)))


async def program(engine: hw.Engine) -> dict[str, list[int]]:
    mirostat = Mirostat()
    hooks = {"plain": None, "mirostat": mirostat, "top-a": top_a, "XTC": xtc, "DRY": dry, "EDT": edt}
    found = {}
    for name, hook in hooks.items():
        async with engine.context().fill(PROMPT) as ctx:
            found[name] = await ctx.generate(hw.Multinomial(seed=3), max_tokens=NEW_TOKENS, logits=hook).tokens()
        print(f"{name}: {engine.tokenizer.decode(found[name])!r}")
    print(f"mirostat's mean surprise is {np.mean(mirostat.seen):.1f} bits a token; {mirostat.tau} was asked for")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
