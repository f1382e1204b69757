"""Filling a template: the letter is fixed, the model writes the blanks, and the rest costs no pass of its own.

The template is one grammar. Its fixed text is the only way to go on where it stands, so it is fed in one go together
with the next blank's first pass; the model is asked only where something is left open.
"""

import re

import headway as hw

FACTS = """Order 4711: two wool blankets for Helga Brandt, who lives in Bremen. Sent by post on Friday.

Letter to the customer:
"""
TEMPLATE = """Dear Mrs. {name},
thank you for your order of two {goods}. They left for your address in {city} on {day}. If anything is missing,
please write to us and mention order number {order}.
Kind regards"""
BLANKS = {"name": "[A-Z][a-z]+", "goods": "[a-z]+ [a-z]+", "city": "[A-Z][a-z]+", "day": "[A-Z][a-z]+", "order": r"\d+"}


def grammar() -> hw.Grammar:
    """The template as a regular expression, every blank in its place."""
    parts = re.split(r"\{(\w+)\}", TEMPLATE)  # text, name, text, name, …, text
    return hw.Grammar.regex("".join(BLANKS[p] if i % 2 else re.escape(p) for i, p in enumerate(parts)))


async def program(engine: hw.Engine) -> tuple[str, int, int]:
    async with engine.context() as ctx:
        await ctx.fill(FACTS).flush()
        before = engine.stats().passes
        generation = ctx.generate(hw.Argmax(), max_tokens=100, constrain=grammar())
        text = await generation.text()
        passes, tokens = engine.stats().passes - before, len(await generation.tokens())
    print(text)
    print(f"\n{tokens} tokens in {passes} passes: {passes} drawn, {tokens - passes} fed from the template")
    return text, tokens, passes


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
