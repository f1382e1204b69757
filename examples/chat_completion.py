"""Chat completion: messages through the model's own template, and each turn computes only what is new.

An endpoint that is sent the whole conversation again computes it again, but for what a cache still has. A context is
the conversation: its keys and values stay, so the second turn computes a question and an answer, not the first turn.
"""

from rich.console import Console
from rich.table import Table

import headway as hw

SYSTEM = "You answer in one short sentence."
QUESTIONS = ["What is the capital of Italy?", "What about France?", "What about Spain?"]


async def program(engine: hw.Engine) -> list[tuple[int, int]]:
    turns = []
    table = Table("turn", "tokens in the conversation", "computed for this turn")
    async with engine.context(salt="chat") as ctx:
        ctx.system(SYSTEM)
        for question in QUESTIONS:
            before = engine.stats().tokens
            ctx.user(question)
            answer = await ctx.generate(hw.Argmax(), max_tokens=24).text()
            ctx.seal()
            print(f"user: {question}\nassistant: {answer}")
            turns.append((len(ctx.tokens), engine.stats().tokens - before))
            table.add_row(str(len(turns)), *map(str, turns[-1]))
    Console().print(table)
    return turns


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
