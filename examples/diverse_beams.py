"""Diverse beam search (Vijayakumar et al., 2016): groups of beams, each kept away from what the others have chosen.

Every step reads all beams in one batch. Then the groups choose in turn: a token that beams of earlier groups have just
taken costs a penalty. Beams are forks, so that what they have in common is held once.
"""

import asyncio

import numpy as np

import headway as hw
from headway import Logits

PROMPT = "In the morning the old man"
BEAMS, PENALTY, TOKENS = 4, 2.0, 12


class Group:
    """Beams that compete with each other, and the best sequences that have ended, with their mean scores."""

    def __init__(self, context: hw.Context) -> None:
        self.beams, self.ended, self.done = [(0.0, (), context)], [], False

    def choose(self, rows: list[np.ndarray], cost: np.ndarray, size: int, ends: set[int]) -> list[int]:
        """The tokens of the beams that go on, from the log-probabilities [V] after each beam."""
        scores = np.concatenate([score + row - cost for (score, _, _), row in zip(self.beams, rows)])
        best, going = np.argsort(-scores, kind="stable")[: (1 + max(1, len(ends))) * size], []
        for rank, (parent, token) in enumerate(divmod(int(i), len(cost)) for i in best):
            (_, tokens, context), score = self.beams[parent], scores[best[rank]]
            if token not in ends and len(going) < size:
                going.append((score, (*tokens, token), context.fork()))
            elif token in ends and rank < size:
                self.ended.append((score / (len(tokens) + 1), tokens))
        self.ended = sorted(self.ended, reverse=True)[:size]
        self.done = len(self.ended) == size and self.ended[-1][0] >= scores[best[0]] / (len(self.beams[0][1]) + 1)
        self.beams = going  # contexts that nobody refers to give their pages back
        return [tokens[-1] for _, tokens, _ in going]


async def read(tokens: tuple[int, ...], context: hw.Context) -> np.ndarray:
    handle = (forward := context.forward().input(tokens[-1:])).probe(-1, Logits())
    logits = (await forward.execute()).logits(handle).astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


async def diverse_beams(ctx: hw.Context, groups: int, size: int, *, penalty: float, tokens: int, ends: set) -> list:
    """The sequences of all groups, each with its score, best first."""
    await ctx.flush()
    search = [Group(ctx.fork()) for _ in range(groups)]
    for _ in range(tokens):
        running, cost = [group for group in search if not group.done], np.zeros(ctx.engine.vocab_size)
        rows = iter(await asyncio.gather(*(read(*beam[1:]) for group in running for beam in group.beams)))
        for group in running:
            for token in group.choose([next(rows) for _ in group.beams], cost.copy(), size, ends):
                cost[token] += penalty
    for group in [group for group in search if not group.done]:
        group.ended += [(score / len(found), found) for score, found, _ in group.beams]
    return sorted((one for group in search for one in sorted(group.ended)[-size:]), reverse=True)


async def program(engine: hw.Engine) -> dict[int, list[str]]:
    found = {}
    for groups in (1, BEAMS):
        before = engine.stats()
        async with engine.context() as ctx:
            how = {"penalty": PENALTY, "tokens": TOKENS, "ends": set(engine.eos_ids)}
            best = await diverse_beams(ctx.fill(PROMPT), groups, BEAMS // groups, **how)
        texts = found[groups] = [engine.tokenizer.decode(tokens) for _, tokens in best]
        words, after = len(set(" ".join(texts).split())), engine.stats()
        print(f"{groups} groups: {words} different words, {after.steps - before.steps} steps", *texts, sep="\n ")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
