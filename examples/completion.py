"""Text completion: a prompt goes in, and its continuation is printed as it becomes certain.

A step brings text only when it can no longer change: no half of a character, no beginning of a stop string. The stops
here take two tokens; when one is complete, the tokens that hold any part of it leave the context again.
"""

import headway as hw

PROMPT = "Once upon a time, in a small village by the sea,"
STOPS = [". ", ".\n"]  # the end of a sentence


async def program(engine: hw.Engine) -> tuple[str, str | None, bool]:
    async with engine.context() as ctx:
        ctx.fill(PROMPT)
        print(PROMPT, end="")
        generation = ctx.generate(hw.TopP(0.9, temperature=0.7, seed=3), max_tokens=60, stop=STOPS)
        text = ""
        async for step in generation:
            print(step.text, end="", flush=True)
            text += step.text
        print(f"\n[ended by {generation.finish!r}; the context has {len(ctx.tokens)} tokens]")
        kept = engine.tokenizer.decode(ctx.tokens) == PROMPT + text
    return text, generation.finish, kept


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
