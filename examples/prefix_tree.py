"""A prefix tree: conversations that share what they have in common, page by page.

A fork shares every full page of its parent and copies at most the last, half-full one. The example grows a tree
(instructions, subject, question), answers at the leaves in one batch, and counts pages and tokens against contexts
that share nothing.
"""

import asyncio

from rich.console import Console
from rich.tree import Tree

import headway as hw
from headway import Argmax

INSTRUCTIONS = (
    "Rules of the town library. The library opens at nine and closes at six, on Saturdays at one. A reader may borrow "
    "ten books for four weeks and renew each of them twice, unless somebody else has asked for it. Maps, newspapers "
    "and books printed before 1900 stay in the reading room. Lost books are paid for at their price when new.\n"
)
SUBJECTS = {
    "About opening hours.": [" The library opens at", " The library closes at"],
    "About books.": [" A reader may borrow up to", " A reader may keep them for", " Maps and newspapers stay in the"],
}


async def answer(ctx: hw.Context) -> str:
    return await ctx.generate(Argmax(), max_tokens=4).text()


async def program(engine: hw.Engine) -> tuple[int, int]:
    start = engine.stats()
    root = engine.context().fill(INSTRUCTIONS)
    await root.flush()
    picture = Tree(f"the rules: {root.seq_len} tokens, {-(-root.seq_len // root.page_size)} pages")
    branches, leaves = [], []
    for subject, questions in SUBJECTS.items():
        branches.append(root.fork().fill(subject))
        await branches[-1].flush()
        twig = picture.add(f"{subject} {branches[-1].seq_len - root.seq_len} tokens more")
        leaves += [(twig, question, branches[-1].fork().fill(question)) for question in questions]
    said = await asyncio.gather(*(answer(leaf) for _, _, leaf in leaves))
    for (twig, question, _), text in zip(leaves, said):
        twig.add(f"{question.strip()} [bold]{text.strip()!r}")
    Console().print(picture)

    end = engine.stats()
    contexts = [root, *branches, *(leaf for _, _, leaf in leaves)]
    held, alone = end.pages_held - start.pages_held, sum(-(-c.seq_len // c.page_size) for c in contexts)
    tokens, lonely = end.tokens - start.tokens, sum(leaf.seq_len for _, _, leaf in leaves)
    print(f"{held} pages held for {len(contexts)} contexts; sharing nothing they would hold {alone}")
    print(f"{tokens} tokens computed; the {len(leaves)} leaves alone would have computed {lonely}")
    for context in contexts:
        context.release()
    return held, alone


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
