"""The README's program: the three likeliest next tokens, and where each of them leads."""

import headway as hw


async def program(engine: hw.Engine) -> list[str]:
    lines = []
    async with engine.context() as ctx:
        ctx.fill("The best way to learn a language is")
        fwd = ctx.forward()
        likely = fwd.probe(-1, hw.Distribution(k=3))  # -1: the last token of the context
        out = await fwd.execute()
        for token, p in zip(*out.distribution(likely)):
            rest = await ctx.fork().fill([token]).generate(hw.Argmax(), max_tokens=8).text()
            lines.append(f"{p:.3f}{engine.tokenizer.decode([token])}{rest}")
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
