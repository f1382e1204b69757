"""Speculative decoding: somebody cheap drafts, one pass verifies several tokens, and the text stays the same.

Prompt lookup (Saxena, 2023) drafts what followed the last words before; self-drafting (Zhang et al., 2023) asks the
model's own first layers; a draft model (Leviathan et al., 2022; Chen et al., 2023) is another engine, here the same
weights in 4 bits. Each draws with the model's own seed, so a draft that would have been drawn anyway is kept.
`adaptive=False` verifies every draft, so that the counts repeat; without it drafting stops where it does not pay.
"""

from rich.console import Console
from rich.table import Table

import headway as hw

NEW_TOKENS = 48
PROMPT = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth

# The same again, with a docstring in each:
def area(width, height):
"""


async def program(engine: hw.Engine) -> dict[str, tuple[list[int], int, hw.SpeculationStats | None]]:
    small = hw.Engine("smollm2", dtype="float32", quantize="int4", pages=64)
    drafters: dict[str, hw.Drafter | None] = {
        "none": None,
        "PromptLookup()": hw.PromptLookup(adaptive=False),
        "OwnLayers(20)": hw.OwnLayers(20, max_tokens=2, adaptive=False),
        "DraftModel(4 bits)": hw.DraftModel(small, adaptive=False),
    }
    found = {}
    table = Table("drafter", "passes of the model", "drafted", "kept", "the same text")
    for name, drafter in drafters.items():
        async with engine.context().fill(PROMPT) as ctx:
            gen = ctx.generate(hw.Multinomial(0.3, seed=1), max_tokens=NEW_TOKENS, speculate=drafter)
            steps = [step async for step in gen]
        found[name] = (list(gen.generated), len(steps), gen.speculation)
        stats = gen.speculation or hw.SpeculationStats()
        same = found[name][0] == found["none"][0]
        table.add_row(name, str(len(steps)), str(stats.drafted), str(stats.accepted), str(same))
    small.close()
    print(engine.tokenizer.decode(found["none"][0]))
    Console().print(table)
    print(f"{NEW_TOKENS} tokens in {min(passes for _, passes, _ in found.values())} passes at best")
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
