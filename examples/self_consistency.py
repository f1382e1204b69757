"""Self-consistency (Wang et al., 2022): draw several chains of thought and let their answers vote.

Wrong chains go wrong in different ways, right ones end in the same number: the answer that most chains reach is right
more often than a single chain. The examples in the prompt are computed once; every chain is a fork of it.
"""

import asyncio
import re
from collections import Counter

import headway as hw

CHAINS = 9
PROMPT = """Question: Ben had 9 marbles and lost 2. How many marbles does he have left?
Answer: Ben had 9 marbles and lost 2, so 9 - 2 = 7. The answer is 7.
Question: Anna has 2 bags with 5 sweets in each. How many sweets does she have?
Answer: Anna has 2 bags with 5 sweets, so 2 * 5 = 10. The answer is 10.
Question: Lea has 4 pens and finds 2 more. How many pens does she have?
Answer: Lea has 4 pens and finds 2, so 4 + 2 = 6. The answer is 6.
Question: Max has 7 stamps and gets 6 more. How many stamps does he have?
Answer:"""


async def program(engine: hw.Engine) -> tuple[Counter[str], int, int]:
    async def chain(seed: int) -> str:
        async with ctx.fork() as fork:
            return await fork.generate(hw.Multinomial(0.5, seed=seed), max_tokens=32, stop="\n").text()

    before = engine.stats().tokens
    async with engine.context(salt="self-consistency") as ctx:
        await ctx.fill(PROMPT).flush()
        prompt = ctx.seq_len
        chains = await asyncio.gather(*map(chain, range(1, CHAINS + 1)))
    tokens = engine.stats().tokens - before
    votes: Counter[str] = Counter()
    for text in chains:
        found = re.search(r"The answer is (\d+)", text)
        votes[found[1] if found else "none"] += 1
        print(f"{'  ' if found is None else found[1]:>4} <-{text}")
    answer, count = votes.most_common(1)[0]
    print(f"the vote: {answer}, by {count} of {CHAINS} chains")
    print(f"{tokens} tokens computed; with a prompt for each chain {tokens + (CHAINS - 1) * prompt}")
    return votes, tokens, prompt


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
