"""Graph of thoughts (Besta et al., 2023) on one of the paper's tasks, counting keywords: split, solve, merge.

Thoughts are a graph, not a tree: the text is split into sentences, several thoughts about each vote on which country
it names, and merges add the counts of two parents. A sentence is easy where the whole text is not. All the thoughts
are forks of one prompt and run in one batch.
"""

import asyncio
from collections import Counter

import headway as hw

THOUGHTS = 3
TEXT = [
    "Maria took the night train to Italy.",
    "Her uncle sells carpets from Turkey.",
    "In the summer they went to Spain.",
    "A letter from Japan had come while they were away.",
    "They hope to see Spain again.",
    "For now they stay in Norway.",
]
PROMPT = """Sentence: Tom sailed to Peru in a small boat.
Country: Peru
Sentence: The tea was grown in India.
Country: India
Sentence: Many people in Kenya speak English.
Country: Kenya
"""
NAME = hw.Grammar.regex(" [A-Z][a-z]+\\n")


async def program(engine: hw.Engine) -> tuple[Counter[str], int, int]:
    async def think(sentence: str, seed: int) -> str:
        async with root.fork().fill(f"Sentence: {sentence}\nCountry:") as fork:
            text = await fork.generate(hw.Multinomial(0.5, seed=seed), max_tokens=12, constrain=NAME).text()
        return text.strip()

    async def solve(sentence: str) -> Counter[str]:
        """The name that most thoughts agree on."""
        names = await asyncio.gather(*(think(sentence, seed) for seed in range(THOUGHTS)))
        return Counter([Counter(names).most_common(1)[0][0]])

    before = engine.stats().tokens
    async with engine.context(salt="graph").fill(PROMPT) as root:
        await root.flush()
        prompt = root.seq_len
        counts = list(await asyncio.gather(*map(solve, TEXT)))
    while len(counts) > 1:  # each merge has two parents
        print(" | ".join(" ".join(f"{name} {n}" for name, n in sorted(count.items())) for count in counts))
        counts = [sum(counts[i : i + 2], Counter[str]()) for i in range(0, len(counts), 2)]
    print(" ".join(f"{name} {n}" for name, n in sorted(counts[0].items())))
    tokens = engine.stats().tokens - before
    apart = tokens + (THOUGHTS * len(TEXT) - 1) * prompt
    print(f"{tokens} tokens computed; with a prompt for each thought {apart}")
    return counts[0], tokens, apart


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
