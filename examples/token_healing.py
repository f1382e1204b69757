"""Token healing: a prompt that ends inside a word is put right by taking its last token back.

The model never saw ' Sta' before 'tes': that text is the one token ' States'. So a prompt cut there is one it cannot
go on from. Take the last token back and let the next be any that begins with the same text: one masked pass.
"""

from rich.console import Console
from rich.table import Table

import headway as hw

PROMPTS = [
    "The president of the United Sta",
    "My favourite season is sum",
    "The opposite of hot is c",
    "Thank you very m",
    "The capital of France is ",
]


async def heal(ctx: hw.Context) -> int:
    """Replace the last token by the likeliest that begins with its text; how many there were to choose from."""
    tokenizer, last = ctx.engine.tokenizer, ctx.tokens[-1]
    text = tokenizer.token_bytes(last)
    begin = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id).startswith(text)]
    fwd = ctx.truncate(1).forward().mask(allow=begin)
    chosen = fwd.sample([-1], hw.Argmax())
    ctx.fill([(await fwd.execute()).token(chosen)])
    return len(begin)


async def go_on(ctx: hw.Context, prompt: str) -> str:
    """What comes behind the prompt's text, wherever the tokens end."""
    await ctx.generate(hw.Argmax(), max_tokens=4, stop="\n").text()
    return ctx.engine.tokenizer.decode(ctx.tokens).removeprefix(prompt)


async def program(engine: hw.Engine) -> dict[str, tuple[str, str]]:
    found = {}
    table = Table("prompt", "goes on", "healed, it goes on", "allowed")
    for prompt in PROMPTS:
        async with engine.context() as ctx:
            plain = ctx.fill(prompt).fork()
            allowed = await heal(ctx)
            as_it_is, healed = [await go_on(version, prompt) for version in (plain, ctx)]
            plain.release()
        found[prompt] = (as_it_is, healed)
        table.add_row(prompt + "▏", as_it_is, healed, str(allowed))
    Console().print(table)
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
