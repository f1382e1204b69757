"""Fan-out: one document computed once, many questions about it, each in a fork, all in one batch.

Against contexts of their own that share nothing (each has its own salt, so the prefix cache cannot help), the answers
are the same; the forks take less time and hold fewer pages, because the document's pages are there once.
"""

import asyncio
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

import headway as hw
from headway import Argmax

DOCUMENT = """The ferry to Skarholm leaves from pier four. In summer it sails at seven, at noon and at five; in winter
only at noon. The crossing takes forty minutes. Tickets are sold on board and cost three crowns, for children one
crown, and nothing for dogs. Bicycles travel on the lower deck and must be tied to the rail. There is no shop on the
island, so bring food and water. The lighthouse is open on Sundays; its keeper, Mrs. Dahl, shows visitors the lamp
room if they ask her. The last boat back leaves at six, and those who miss it may sleep in the old school.\n"""
QUESTIONS = [
    "The ferry leaves from pier",
    "The crossing takes",
    "A ticket for a child costs",
    "In winter the ferry sails at",
    "Bicycles travel on the",
    "The lighthouse is open on",
    "The keeper's name is",
    "The last boat back leaves at",
]
NEW_TOKENS = 6


async def program(engine: hw.Engine) -> tuple[dict[str, list[str]], dict[str, int]]:
    async def answer(ctx: hw.Context) -> str:
        return await ctx.generate(Argmax(), max_tokens=NEW_TOKENS, stop=[".", "\n"]).text()

    async def ask(contexts: list[hw.Context]) -> tuple[list[str], int]:
        """The answers, and the pages held when all of them are there."""
        texts = await asyncio.gather(*map(answer, contexts))
        return texts, engine.stats().pages_held

    async def forks() -> tuple[list[str], int]:
        async with engine.context(salt="fan-out") as ctx:
            await ctx.fill(DOCUMENT).flush()
            return await ask([ctx.fork().fill(question) for question in QUESTIONS])

    async def apart() -> tuple[list[str], int]:
        fresh = [engine.context(salt=f"apart {i}") for i in range(len(QUESTIONS))]
        return await ask([ctx.fill(DOCUMENT).fill(question) for ctx, question in zip(fresh, QUESTIONS)])

    table = Table("how", "tokens computed", "pages held", "seconds", title=f"{len(QUESTIONS)} questions, one document")
    texts: dict[str, list[str]] = {}
    pages: dict[str, int] = {}
    ways: dict[str, Callable] = {"forks": forks, "apart": apart}
    for how, way in ways.items():
        before, began = engine.stats(), time.perf_counter()
        texts[how], held = await way()
        seconds, tokens = time.perf_counter() - began, engine.stats().tokens - before.tokens
        pages[how] = held - before.pages_held
        table.add_row(how, str(tokens), str(pages[how]), f"{seconds:.1f}")
    for question, text in zip(QUESTIONS, texts["forks"]):
        print(f"{question} [{text.strip()}]")
    Console().print(table)
    print(f"sharing saved {pages['apart'] - pages['forks']} of {pages['apart']} pages")
    return texts, pages


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
