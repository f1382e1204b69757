"""Contrastive search (Su et al., 2022): likely tokens that are unlike what came before, in one pass a token.

The k likeliest tokens go into one pass as k rows at one position, none of which sees another. Each row's hidden state
says how much that token would repeat what is there; the best row stays (`keep_slots`), with its logits for the next
token, and the others leave no slot. Nothing is computed twice.
"""

import numpy as np

import headway as hw
from headway import Argmax, Hidden, Logits, Mask

PROMPT = "DeepMind Company is"
K, ALPHA, TOKENS = 4, 0.6, 40


async def contrastive(engine: hw.Engine, prompt: str, k: int, alpha: float, tokens: int) -> list[int]:
    last = Hidden(engine.config.layers)
    async with engine.context() as ctx:
        ids = ctx.fill(prompt).pending
        fwd = ctx.truncate(len(ids)).forward().input(ids)
        states = [fwd.probe(row, last) for row in range(len(ids))]
        end = fwd.probe(-1, Logits())
        out = await fwd.execute()
        past = [out.hidden(state) for state in states]
        logits, chosen = out.logits(end), []
        while len(chosen) < tokens:
            probs = np.exp(logits.astype(np.float64) - logits.max())
            best = np.argsort(-probs, kind="stable")[:k]
            n, at = ctx.seq_len, ctx.next_position
            seen = np.zeros((k, n + k), bool)  # all that is there, and itself
            seen[:, :n], seen[np.arange(k), n + np.arange(k)] = True, True
            fwd = ctx.forward().input_at(best, [at] * k).attention_mask(Mask.from_bool(seen))
            states, ends = [fwd.probe(i, last) for i in range(k)], [fwd.probe(i, Logits()) for i in range(k)]
            out = await fwd.execute()
            rows = [out.hidden(state) for state in states]
            repeats = [max(cosine(row, old) for old in past) for row in rows]
            scores = (1 - alpha) * probs[best] / probs.sum() - alpha * np.array(repeats)
            winner = int(np.argmax(scores))
            ctx.inner().keep_slots([*range(n), n + winner], start=0)
            chosen.append(int(best[winner]))
            past.append(rows[winner])
            logits = out.logits(ends[winner])
    return chosen


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def repeated(tokens: list[int], n: int = 4) -> int:
    """How many runs of n tokens came before."""
    runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(runs) - len(set(runs))


async def program(engine: hw.Engine) -> dict[str, int]:
    async with engine.context() as ctx:
        greedy = await ctx.fill(PROMPT).generate(Argmax(), max_tokens=TOKENS, stop_only=True).tokens()
    before = engine.stats().passes
    found = {"greedy": greedy, "contrastive": await contrastive(engine, PROMPT, K, ALPHA, TOKENS)}
    passes = engine.stats().passes - before
    for name, tokens in found.items():
        print(f"{name}: {engine.tokenizer.decode(tokens)!r}")
    print(f"{passes} passes for {TOKENS} tokens of {K} candidates each; a pass for each: {TOKENS * K + 1}")
    return {name: repeated(tokens) for name, tokens in found.items()}


if __name__ == "__main__":
    print(hw.Engine("smollm2").run(program))
