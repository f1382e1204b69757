"""Jacobi decoding: guess the next tokens, correct all of them in one pass, and repeat.

Each pass draws the likeliest token after every guess at once; guesses that equal the draw before them stand (Santilli
et al., 2023). What earlier passes drew after a token is the next guess after it, as in lookahead decoding (Fu et al.,
2024). No draft model, no training, and exactly the tokens of greedy decoding.
"""

import headway as hw

WINDOW, NEW_TOKENS = 6, 48
PROMPT = "Monday: closed\nTuesday: open from 9 to 5\nWednesday: open from 9 to 5\nThursday:"


async def jacobi(ctx: hw.Context, count: int) -> tuple[list[int], int]:
    """Greedy tokens, several a pass where guesses are right, and how many passes that took."""
    found: list[int] = []
    after: dict[int, int] = {}  # token → what was last drawn after it
    passes, last = 0, ctx.tokens[-1]
    while len(found) < count:
        line = [last]
        for _ in range(WINDOW):
            line.append(after.get(line[-1], line[-1]))
        fwd = ctx.forward().input(line[1:])
        handle = fwd.sample(range(-WINDOW - 1, 0), hw.Argmax())  # after the last token and after each guess
        drawn = (await fwd.execute()).tokens(handle)
        passes += 1
        after |= zip(line, drawn)
        right = next((i for i in range(WINDOW) if line[i + 1] != drawn[i]), WINDOW)
        found += drawn[: right + 1]
        last = drawn[right]
        after |= zip(line[: right + 1], drawn)  # these are sure
        ctx.truncate(WINDOW - right).fill([last])  # wrong guesses leave no slot
    return found[:count], passes


async def program(engine: hw.Engine) -> tuple[list[int], list[int], int]:
    async with engine.context().fill(PROMPT) as ctx, ctx.fork() as fork:
        found, passes = await jacobi(fork, NEW_TOKENS)
        greedy = await ctx.generate(hw.Argmax(), max_tokens=NEW_TOKENS).tokens()
    print(PROMPT + engine.tokenizer.decode(found))
    print(f"{len(found)} tokens in {passes} passes; the same as greedy decoding: {found == greedy}")
    return found, greedy, passes


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
