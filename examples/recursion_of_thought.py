"""Recursion of thought (Lee and Kim, 2023): a subproblem gets a context of its own, and only its answer comes back.

The model splits a question into simpler ones, as the examples show. Each is solved by the same function in a fork of
the prompt; its answer is put in where it was asked for, and the thought goes on. No context holds the whole work, so it
may grow beyond what one could.
"""

import headway as hw

PROMPT = """Question: In which country is the Eiffel Tower?
Answer: France
Question: What is the capital of Egypt?
Answer: Cairo
Question: What is the capital of the country where the Eiffel Tower is?
First: In which country is the Eiffel Tower?
It is: France
Then: What is the capital of France?
It is: Paris
"""
SIGHTS = ["the Colosseum", "Big Ben"]


async def solve(root: hw.Context, question: str, sizes: list[int], depth: int = 0) -> str:
    """The answer to a question; one with a "where" in it is asked in parts, which the model words."""
    text = ""
    print(f"{'  ' * depth}{question}")
    async with root.fork().fill(f"Question: {question}\n") as ctx:
        for kind in ("First", "Then") if " where " in question else ("Answer",):
            line = hw.Grammar.regex(f"{kind}: [^\\n]{{3,50}}\\n")
            text = (await ctx.generate(hw.Argmax(), max_tokens=24, constrain=line).text()).strip().split(": ")[1]
            if kind != "Answer":
                text = await solve(root, text, sizes, depth + 1)
                ctx.fill(f"It is: {text}\n")
        sizes.append(len(ctx.tokens) - root.seq_len)
    print(f"{'  ' * depth}-> {text}")
    return text


async def program(engine: hw.Engine) -> tuple[list[str], list[int]]:
    sizes: list[int] = []
    async with engine.context().fill(PROMPT) as root:
        await root.flush()
        asked = [f"What is the capital of the country where {sight} is?" for sight in SIGHTS]
        answers = [await solve(root, question, sizes) for question in asked]
    print(f"{len(sizes)} contexts of at most {max(sizes)} tokens after the prompt, {sum(sizes)} together")
    return answers, sizes


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
