"""Monte Carlo tree search with a verifier (Coulom, 2006; Hao et al., 2023): spend passes where they have paid off.

The tree's moves are lines of arithmetic; the root is the prompt and each node a fork of its parent, so a move is never
computed twice. A visit goes down by UCT, adds one node that the model chooses, plays on to the end, and asks the
verifier how far from 24 the result is. No judge of unfinished games is needed.
"""

import math
from dataclasses import dataclass, field
from itertools import permutations

import headway as hw

NUMBERS, TARGET, VISITS = (2, 4, 5, 6), 24, 150
PROMPT = "Use the numbers 1, 2, 6 and 8 to make 24.\n2 + 1 = 3\n6 - 3 = 3\n8 * 3 = 24\nUse 2, 4, 5 and 6 to make 24.\n"


def moves(numbers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Every line that can be written, and the numbers that are left after it."""
    signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    found = [(a, sign, b, do(a, b), rest) for a, b, *rest in permutations(numbers) for sign, do in signs.items()]
    return {f"{a} {sign} {b} = {c}\n": tuple(sorted([*rest, c])) for a, sign, b, c, rest in found if c > 0}


@dataclass(eq=False)
class Node:
    ctx: hw.Context
    numbers: tuple[int, ...]
    text: str = ""
    visits: int = 0
    won: float = 0
    children: dict[str, "Node"] = field(default_factory=dict)

    async def child(self, seed: int) -> "Node":  # the model chooses among the moves that have none
        after = moves(self.numbers)
        left = [line for line in after if line not in self.children]
        ctx = self.ctx.fork()
        line = await ctx.generate(hw.Multinomial(1.5, seed=seed), constrain=hw.Grammar.choices(left)).text()
        self.children[line] = Node(ctx, after[line], self.text + line)
        return self.children[line]

    def bound(self, parent: "Node") -> float:
        """What this move may be worth at most (UCT)."""
        return self.won / self.visits + math.sqrt(2 * math.log(parent.visits) / self.visits)


async def visit(root: Node, seed: int) -> Node:
    """One visit; the leaf that it ended in."""
    path = [root]
    while len(path[-1].numbers) > 1 and len(path[-1].children) > path[-1].visits ** 0.5:  # few moves, more with visits
        path.append(max(path[-1].children.values(), key=lambda child: child.bound(path[-1])))
    while len(path[-1].numbers) > 1:
        path.append(await path[-1].child(seed))
    won = 1 / (1 + abs(sum(path[-1].numbers) - TARGET))  # the verifier: 1 for a win, less further away
    for node in path:
        node.visits, node.won = node.visits + 1, node.won + won
    return path[-1]


async def program(engine: hw.Engine) -> tuple[str, int, int, int]:
    before, apart = engine.stats().tokens, 0
    async with engine.context(salt="mcts").fill(PROMPT) as ctx:
        await ctx.flush()
        root = leaf = Node(ctx, NUMBERS)
        while leaf.numbers != (TARGET,) and root.visits < VISITS:
            leaf = await visit(root, root.visits)
            apart += len(leaf.ctx.tokens)
    tokens = engine.stats().tokens - before
    print(f"visit {root.visits}: {'; '.join(leaf.text.splitlines())}")
    print(f"{tokens} tokens computed; starting over at each visit {apart}")
    return leaf.text, root.visits, tokens, apart


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
