"""An agent with a real tool: the model asks a database, reads the result and answers from it.

The tool is a typed Python function. Its signature is the schema under which the call is generated, so every call can be
made; what to ask for is the model's choice. The result goes back through the chat template. A model of this size calls
no tool unasked: it is shown one example, and the first message of a reply must be a call.
"""

import sqlite3
from typing import Any, Literal

import headway as hw

STOCK = {"apples": 40, "pears": 17, "nuts": 365, "plums": 8}
Item = Literal["apples", "pears", "nuts", "plums"]
QUESTIONS = ["How many pears are in the store?", "How many nuts do we have?", "How many plums are left?"]
CALL = {"id": "call00000", "type": "function", "function": {"name": "stock", "arguments": {"item": "apples"}}}
EXAMPLE: list[dict[str, Any]] = [
    {"role": "user", "content": "How many apples are in the store?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "stock", "tool_call_id": "call00000", "content": "40 apples"},
    {"role": "assistant", "content": "There are 40 apples in the store."},
]


async def program(engine: hw.Engine) -> list[tuple[str, str]]:
    database = sqlite3.connect(":memory:", check_same_thread=False)  # a tool runs in a thread of its own
    database.execute("create table stock (item text primary key, pieces integer)")
    database.executemany("insert into stock values (?, ?)", STOCK.items())

    def stock(item: Item) -> str:
        """Look up how many pieces of an item are in the store."""
        (pieces,) = database.execute("select pieces from stock where item = ?", [item]).fetchone()
        return f"{pieces} {item}"

    found = []
    for question in QUESTIONS:
        async with engine.context() as ctx:
            said = [*EXAMPLE, {"role": "user", "content": question}]
            reply = ctx.chat(
                said, hw.Argmax(), tools=[stock], tool_format="hermes", tool_choice="required", max_tokens=40
            )
            print(f"user: {question}")
            result = ""
            async for part in reply:
                if isinstance(part, hw.ToolResult):
                    result = part.text
                    print(f"  {part.call.name}({part.call.arguments}) -> {result}")
            print(f"assistant: {reply.content}")
            found.append((result, reply.content))
    database.close()
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
