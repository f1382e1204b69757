"""Asynchronous function calls (AsyncLM, Gim et al., 2024): the model goes on writing while its calls run.

A line that begins with "call" starts a task; the generation does not wait. When a result is there it is put into the
context at the next line, and the model goes on from it. Calls overlap with each other and with the text. Their time is
counted here in tokens written, so that the figures repeat: a call takes as long as TAKES tokens.
"""

import asyncio

import headway as hw

TAKES = 12
WEATHER = {"Cairo": 31, "Lima": 19, "Bern": 12}
PROMPT = """Task: How warm is it in Rome, Oslo and Kyiv?
call Rome
call Oslo
call Kyiv
note Rome is in Italy and Oslo is in Norway.
got Rome 21
got Oslo 3
got Kyiv 8
answer Rome has 21, Oslo has 3 and Kyiv has 8 degrees.

Task: How warm is it in Cairo, Lima and Bern?
"""


class Clock:
    """Time in tokens."""

    def __init__(self) -> None:
        self.now, self.moved = 0, asyncio.Event()

    async def tick(self, tokens: int) -> None:
        self.now, moved, self.moved = self.now + tokens, self.moved, asyncio.Event()
        moved.set()
        await asyncio.sleep(0)  # let tasks run

    async def weather(self, city: str) -> str:
        due = self.now + TAKES
        while self.now < due:
            await self.moved.wait()
        return f"got {city} {WEATHER[city]}\n"


async def program(engine: hw.Engine) -> tuple[str, int, int]:
    clock, running, text, asked, notes = Clock(), list[asyncio.Task[str]](), "", set[str](), 0
    async with engine.context().fill(PROMPT) as ctx:
        while not text.startswith("answer"):
            calls = "|".join(f"call {city}" for city in WEATHER if city not in asked)
            lines = f"({calls})" if calls else "note [^\\n]{10,50}\\." if running else "answer [^\\n]{10,60}\\."
            gen = ctx.generate(hw.Argmax(), max_tokens=40, constrain=hw.Grammar.regex(lines + "\\n"))
            text = (await gen.text()).strip()
            print(f"{clock.now:3}: {text}")
            notes += len(gen.generated) if text.startswith("note") else 0
            await clock.tick(len(gen.generated))
            if text.startswith("call"):
                asked.add(text.split()[1])
                running.append(asyncio.create_task(clock.weather(text.split()[1])))
                await asyncio.sleep(0)
            for task in [task for task in running if task.done()]:
                running.remove(task)
                ctx.fill(task.result())
                print(f"{clock.now:3}: {task.result().strip()}  (put in)")
    apart = clock.now - notes + len(WEATHER) * TAKES
    print(f"done at {clock.now}, notes included; without notes, and waiting for each call in turn, at {apart}")
    return text, clock.now, apart


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
