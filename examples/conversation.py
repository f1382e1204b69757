"""A conversation that outlives its process: run this three times, and each run goes on where the last one stopped.

The context is saved with its keys and values, so a new process reads the history from disk instead of computing it.
"""

import headway as hw

QUESTIONS = ["What is the capital of Italy?", "What about France?", "Which river flows through it?"]


async def program(engine: hw.Engine, name: str = "example-conversation") -> tuple[int, int, str]:
    ctx = engine.open(name)
    if ctx is None:
        print(f"nothing is saved as {name!r}: a new conversation")
        ctx = engine.context().system("You answer in one short sentence.")
    else:
        print(f"opened {name!r}: {ctx.seq_len} slots from disk, {len(ctx.messages)} messages")
    async with ctx:
        asked = sum(message["role"] == "user" for message in ctx.messages)
        before = engine.stats().tokens
        ctx.user(QUESTIONS[asked])
        answer = await ctx.generate(hw.Argmax(), max_tokens=20).text()
        ctx.seal()
        for message in ctx.messages:
            print(f"  {message['role']:>9}: {message['content']}")
        print(f"{engine.stats().tokens - before} tokens computed for a conversation of {ctx.seq_len}")
        if asked + 1 < len(QUESTIONS):
            ctx.save(name, durable=True)
        else:
            engine.delete(name)
            print("that was the last question; the next run starts afresh")
    return asked + 1, engine.stats().tokens - before, answer


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
