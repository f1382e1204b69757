"""A cache of prompt parts (Prompt Cache, Gim et al., 2023): compute each part once, and put prompts together from them.

Every part is computed once at positions of its own. A prompt takes the parts it needs in any combination, without
computing them again and without a copy: `append_from` shares their pages. A prefix cache could not: it ends where two
prompts first differ. As in the paper, parts do not attend to each other; the question attends to all of them.
"""

import headway as hw

PARTS = {
    "hours": "The library is open from nine to five, and closed on Sundays. ",
    "fees": "A late book costs ten cents a day. ",
    "rooms": "The reading room is on the second floor, next to the maps. ",
    "staff": "The head librarian is called Mrs. Winter. ",
}
ASKED = [
    (("hours", "staff"), "The name of the head librarian is Mrs."),
    (("staff", "fees"), "A late book costs ten"),
    (("rooms", "fees", "hours"), "The library is closed on"),
    (("fees", "staff", "hours"), "The library is open from nine to"),
]


async def computed(engine: hw.Engine, text: str, start: int) -> hw.Context:
    """A part in a context of its own, from a position on, in whole pages."""
    ids = engine.tokenizer.encode(text)
    newline = engine.tokenizer.encode("\n")
    ids += newline * (-len(ids) % engine.page_size)
    ctx = engine.context()
    await ctx.forward().input_at(ids, range(start, start + len(ids))).execute()
    return ctx


async def program(engine: hw.Engine) -> tuple[dict[str, str], int, int]:
    answers, apart = {}, 0
    before = engine.stats()
    parts, start = {}, 0
    for name, text in PARTS.items():
        parts[name] = await computed(engine, text, start)
        start += parts[name].seq_len
    for names, question in ASKED:
        async with engine.context() as ctx:
            for name in names:
                ctx.inner().append_from(parts[name], range(parts[name].seq_len // ctx.page_size))
            apart += len(engine.tokenizer.encode("".join(PARTS[name] for name in names) + question))
            answers[question] = await ctx.fill(question).generate(hw.Argmax(), max_tokens=3, stop=["\n", "."]).text()
            print(f"{' + '.join(names)}: {question}{answers[question]}")
    after = engine.stats()
    written = after.passes - before.passes - len(PARTS) - len(ASKED)  # passes that only decode
    tokens = after.tokens - before.tokens - written
    for part in parts.values():
        part.release()
    print(f"{tokens} prompt tokens computed instead of {apart}")
    return answers, tokens, apart


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
