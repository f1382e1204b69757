"""Tree speculation (SpecInfer, Miao et al., 2023): verify several possible continuations in one pass.

A drafter is any object with `draft` and `accept`. This one looks up all that followed the last two tokens before, and
drafts it as a tree: where the text went two ways, both are verified, each masked from the other, and the path that the
model takes is kept in consecutive slots. A line can only bet on one of them.
"""

from collections.abc import Sequence

import headway as hw

DEPTH, NEW_TOKENS = 6, 48
PROMPT = """Ann: I would like some tea, please.
Ben: I would like some coffee, please.
Ann: I would like some bread, please.
Ben: I would like some cheese, please.
Ann:"""


class Followers:
    """Drafts what followed the last two tokens, the `width` latest places of it."""

    adaptive = False

    def __init__(self, width: int) -> None:
        self.width = width

    def accept(self, tokens: Sequence[int]) -> None:
        pass  # `draft` is given the whole sequence

    def copy(self) -> "Followers":
        return Followers(self.width)

    def draft(self, tokens: Sequence[int], limit: int) -> hw.Draft:
        text = tuple(tokens[:])
        places = [i for i in range(len(text) - 1, 1, -1) if text[i - 2 : i] == text[-2:]][: self.width]
        nodes: dict[tuple[int, ...], int] = {(): -1}  # a path of tokens → its index in the draft
        parents: list[int] = []
        for place in places:
            path = text[place : place + DEPTH]
            for end in range(1, len(path) + 1):
                if path[:end] not in nodes and len(parents) < limit:
                    nodes[path[:end]] = len(parents)
                    parents.append(nodes[path[: end - 1]])
        return hw.Draft([path[-1] for path in list(nodes)[1:]], parents)


async def program(engine: hw.Engine) -> dict[str, tuple[list[int], int, int]]:
    found = {}
    for name, width in {"no drafts": 0, "a line": 1, "a tree": 4}.items():
        async with engine.context().fill(PROMPT) as ctx:
            drafter = Followers(width) if width else None
            gen = ctx.generate(hw.Argmax(), max_tokens=NEW_TOKENS, speculate=drafter)
            steps = [step async for step in gen]
        drafted = sum(step.drafted for step in steps)
        found[name] = (list(gen.generated), len(steps), drafted)
    same = len({tuple(tokens) for tokens, _, _ in found.values()}) == 1
    print(f"{PROMPT[-4:]}{engine.tokenizer.decode(found['a tree'][0])}\n")
    counts = ", ".join(f"{name}: {passes} passes, {drafted} drafted" for name, (_, passes, drafted) in found.items())
    print(f"{NEW_TOKENS} tokens, the same each time: {same}. {counts}")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2", dtype="float32").run(program)  # with quantized activations a tree is verified as a line
