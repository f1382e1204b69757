"""JSON extraction: a schema that the answer cannot break, and fewer passes than tokens.

Where the schema leaves one way to go on (names of fields, brackets), the tokens are fed without asking the model. The
same document written freely takes a pass a token, and nothing makes it valid.
"""

import json

import headway as hw

EXAMPLE = (
    "Text: Tom Hale, 51, is a carpenter and lives in Leeds. He speaks English and French.\n"
    'JSON: {"full_name":"Tom Hale","age_in_years":51,"profession":"carpenter","place_of_residence":"Leeds",'
    '"spoken_languages":["English","French"]}\n'
)
TEXT = "Text: Anna Berg, 34, is a baker and lives in Oslo. She speaks Norwegian and German.\nJSON: "
FIELDS = {
    "full_name": {"type": "string"},
    "age_in_years": {"type": "integer", "minimum": 0},
    "profession": {"type": "string"},
    "place_of_residence": {"type": "string"},
    "spoken_languages": {"type": "array", "items": {"type": "string"}},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}


async def program(engine: hw.Engine) -> tuple[dict, int, int]:
    async with engine.context() as ctx:
        await ctx.fill(EXAMPLE + TEXT).flush()
        before = engine.stats().passes
        grammar = hw.Grammar.json_schema(SCHEMA, compact=True)
        generation = ctx.generate(hw.Argmax(), max_tokens=100, constrain=grammar)
        shown = []
        async for step in generation:
            shown.append(f"«{step.text}»" if len(step.tokens) > 1 else step.text)  # several tokens: nobody drew them
        passes = engine.stats().passes - before
        tokens = await generation.tokens()
    print("".join(shown))
    found = json.loads(engine.tokenizer.decode(tokens))
    for field, value in found.items():
        print(f"{field:>20}: {value!r}")
    print(f"{len(tokens)} tokens in {passes} passes: {len(tokens) - passes} were forced, such as those in «»")
    return found, len(tokens), passes


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
