"""Speculation under a grammar: drafts are masked like draws, so both savings add up.

A grammar puts in by itself what can only follow (forced tokens); a drafter guesses the rest from the prompt, which an
extraction mostly copies. Every draft is verified under the mask of its place: the JSON is the same, and always valid.
"""

import json
from typing import Any

import headway as hw

LETTER = "Anna Berg works at the Golden Crescent Bakery and lives in Oslo."
FIELDS = ("full_name", "name_of_employer", "place_of_residence")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {field: {"type": "string", "maxLength": 40} for field in FIELDS},
    "required": list(FIELDS),
    "additionalProperties": False,
}


async def program(engine: hw.Engine) -> dict[str, tuple[str, int, int]]:
    found = {}
    drafters = {"forced": None, "forced and drafted": hw.PromptLookup(min_ngram=1, adaptive=False)}
    for name, drafter in drafters.items():
        async with engine.context().user(f"{LETTER} Write this as JSON.") as ctx:
            grammar = hw.Grammar.json_schema(SCHEMA)
            gen = ctx.generate(hw.Argmax(), max_tokens=100, constrain=grammar, speculate=drafter)
            before = engine.stats().passes
            text = await gen.text()
            passes = engine.stats().passes - before
        found[name] = (text, len(gen.generated), passes)
    print(json.dumps(json.loads(found["forced and drafted"][0]), indent=2))
    print(", ".join(f"{name}: {tokens} tokens in {passes} passes" for name, (_, tokens, passes) in found.items()))
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
