"""Filling a form: each field has a regular expression, and what the model writes there matches it.

Beside it stands what the model would have written freely, from a fork. The pattern starts with the space and ends with
the line: tokens carry their leading space, and a field that may end only there is one the model finishes.
"""

import re

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import headway as hw

MESSAGE = (
    "This is Mira Lind. I would like a double room for three nights from 14 June 2025. Please call me at 555-0142.\n\n"
)
FIELDS = {
    "Last name": r"[A-Z][a-z]+",
    "Room type": r"(single|double)",
    "Number of nights": r"(one|two|three|four)",
    "Date of arrival": r"\d\d? [A-Z][a-z]+ \d{4}",
    "Phone": r"\d{3}-\d{4}",
}


async def program(engine: hw.Engine) -> dict[str, tuple[str, str]]:
    found = {}
    async with engine.context() as ctx:
        ctx.fill(MESSAGE)
        for field, pattern in FIELDS.items():
            await ctx.fill(f"{field}:").flush()
            with ctx.fork() as fork:
                free = await fork.generate(hw.Argmax(), max_tokens=12, stop="\n").text()
            grammar = hw.Grammar.regex(f" {pattern}\n")
            text = await ctx.generate(hw.Argmax(), max_tokens=20, constrain=grammar).text()
            found[field] = text.strip(), free.strip()
    table = Table("field", "pattern", "filled", "freely")
    for field, (text, free) in found.items():
        fits = re.fullmatch(FIELDS[field], free) is not None
        table.add_row(field, escape(FIELDS[field]), text, free + ("" if fits else " ✗"))
    Console().print(table)
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
