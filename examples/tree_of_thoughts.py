"""Tree of thoughts (Yao et al., 2023) on the paper's game of 24: think in steps, judge each, keep the best few.

A thought is one line of arithmetic. The model proposes some on forks of each state, all in one batch; a judge keeps the
states from which 24 can still be reached. In the paper the judge is a large model; here it is Python, which is sure.
Every state is a context that shares the pages of its past.
"""

import asyncio
from itertools import permutations

import headway as hw

NUMBERS, TARGET, PROPOSALS, KEPT = (1, 2, 3, 4), 24, 6, 2
PROMPT = "Use the numbers 1, 2, 6 and 8 to make 24.\n2 + 1 = 3\n6 - 3 = 3\n8 * 3 = 24\nUse 1, 2, 3 and 4 to make 24.\n"
State = tuple[hw.Context, tuple[int, ...], str]


def thoughts(numbers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Every line that can be written, and the numbers that are left after it."""
    found = {}
    for a, b, *rest in permutations(numbers):
        for sign, value in (("+", a + b), ("-", a - b), ("*", a * b)):
            if value > 0:
                found[f"{a} {sign} {b} = {value}\n"] = tuple(sorted([*rest, value]))
    return found


def possible(numbers: tuple[int, ...]) -> bool:
    """The judge."""
    return numbers == (TARGET,) or (len(numbers) > 1 and any(possible(rest) for rest in thoughts(numbers).values()))


async def propose(state: State, seed: int) -> State:
    ctx, numbers, text = state
    fork, lines = ctx.fork(), thoughts(numbers)
    line = await fork.generate(hw.Multinomial(1.5, seed=seed), constrain=hw.Grammar.choices(list(lines))).text()
    return fork, lines[line], text + line


async def program(engine: hw.Engine) -> tuple[list[str], int, int]:
    before, apart = engine.stats().tokens, 0
    async with engine.context(salt="tree of thoughts").fill(PROMPT) as root:
        await root.flush()
        states: list[State] = [(root, NUMBERS, "")]
        while states and len(states[0][1]) > 1:
            proposed = await asyncio.gather(*(propose(s, seed) for s in states for seed in range(PROPOSALS)))
            apart += sum(len(ctx.tokens) for ctx, _, _ in proposed)
            good = {numbers: (ctx, numbers, text) for ctx, numbers, text in proposed if possible(numbers)}
            lines = sorted({text.splitlines()[-1] for _, _, text in proposed})
            print(f"{len(proposed)} thoughts, {len(good)} good: {'; '.join(lines)}")
            states = list(good.values())[:KEPT]
        answers = [text for _, _, text in states]
    tokens = engine.stats().tokens - before
    print(f"answer: {'; '.join(answers[0].splitlines()) if answers else 'none'}")
    print(f"{tokens} tokens computed; with a prompt for each thought {apart}")
    return answers, tokens, apart


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
