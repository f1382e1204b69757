"""Schemas, expressions and grammars that are deep, wide, endless, or grow when they are compiled.

Each is answered or refused within the time that a grammar has; none takes the process along, and a neighbor with a
grammar of its own gets it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.live import Answer, Live
from support.small import PROMPT
from support.sweeps import swept

C, M = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
DEPTH = 30_000


def nested(opening: str, inside: str, closing: str, depth: int = DEPTH) -> str:
    return opening * depth + inside + closing * depth


DEEP = {
    "not": nested('{"not":', "{}", "}"),
    "items": nested('{"items":', "{}", "}", 20_000),
    "anyOf": nested('{"anyOf":[', "{}", "]}", 20_000),
    "properties": nested('{"properties":{"a":', "{}", "}}", 12_000),
    "enum": '{"enum":[' + nested("[", "1", "]") + "]}",
    "const": '{"const":' + nested('{"a":', "1", "}") + "}",
    "default": '{"default":' + nested("[", "", "]") + "}",
    "array": nested("[", "", "]"),
}
PLACES = {
    "response_format": (M, '"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":%s}}'),
    "structured_outputs": (C, '"structured_outputs":{"json":%s}'),
    "tools": (M, '"tool_choice":"required","tools":[{"type":"function","function":{"name":"f","parameters":%s}}]'),
    "metadata": (C, '"metadata":%s'),
}


def ask(served: Live, path: str, fields: str) -> Answer:
    """A request whose body is written by hand; it must be answered or refused."""
    first = '"prompt":"hi"' if path == C else f'"messages":{json.dumps(USER)}'
    response = served.ask("POST", path, f'{{{first},"max_tokens":4,{fields}}}'.encode())
    assert response.status in (200, 400), (fields[:200], response.status, response.body[:300])
    if response.status == 400:
        assert response.error["message"]
        assert len(response.body) < 1500
    return response


@pytest.mark.parametrize("place", PLACES)
def test_schemas_nested_deep(served: Live, place: str) -> None:
    path, fields = PLACES[place]
    for form in DEEP.values():
        assert ask(served, path, fields % form).status == 400


def test_schemas_nested_deep_as_text(served: Live) -> None:
    """JSON in a string passes the body's parser and meets the schema's own."""
    for form in DEEP.values():
        assert ask(served, C, f'"structured_outputs":{{"json":{json.dumps(form)}}}').status == 400


@pytest.mark.parametrize("depth", [50, 200, 900])
def test_schemas_nested_less_deep(served: Live, depth: int) -> None:
    """What the parser still takes: the compiler's own limits must hold."""
    for opening, closing in (('{"items":', "}"), ('{"anyOf":[', "]}"), ('{"properties":{"a":', "}}"), ('{"not":', "}")):
        ask(served, C, f'"structured_outputs":{{"json":{nested(opening, "{}", closing, depth)}}}')


@pytest.mark.parametrize(
    "text",
    [
        nested("[", "", "]"),
        nested('{"a":', "1", "}"),
        nested("(", "a", ")"),
    ],
)
def test_other_texts_nested_deep(served: Live, text: str) -> None:
    """As a message, a tool's arguments, a prompt, an expression, a grammar."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    said = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    assert served.post(M, messages=said, max_tokens=2).status == 400
    assert served.post(M, messages=[{"role": "user", "content": text}], max_tokens=2).status == 400  # too long
    assert served.post(C, prompt=PROMPT, structured_outputs={"regex": text}).status == 400
    assert served.post(C, prompt=PROMPT, structured_outputs={"grammar": f"start: {text}"}).status == 400


WIDE: dict[str, Any] = {
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    "many required": {"type": "object", "required": [f"p{i}" for i in range(8000)]},
    "many choices": {"enum": [f"value {i}" for i in range(12_000)]},
    "every order": {"type": "object", "additionalProperties": False, "required": [f"p{i}" for i in range(400)]},
    "all of all": {"allOf": [{"anyOf": [{"type": "string"}, {"minLength": i}]} for i in range(300)]},
    "products": {"allOf": [{"anyOf": [{"pattern": f"a{i}"}, {"pattern": f"b{i}"}]} for i in range(24)]},
    "long strings": {"type": "string", "minLength": 10**9},
    "long arrays": {"type": "array", "minItems": 10**9},
    "large numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "small steps": {"type": "number", "multipleOf": 1e-300},
    "itself": {"$ref": "#"},
    "itself twice": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "itself everywhere": {"anyOf": [{"$ref": "#"}] * 20, "allOf": [{"$ref": "#"}] * 20},
    "doubling": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}},
    },
    "elsewhere": {"$ref": "file:///etc/passwd"},
    "over the net": {"$ref": "http://127.0.0.1:1/schema.json"},
}


@pytest.mark.parametrize("part", swept(range(4), 2))
def test_schemas_that_grow(served: Live, part: int) -> None:
    for schema in list(WIDE.values())[part::4]:
        ask(served, C, f'"structured_outputs":{{"json":{json.dumps(schema)}}}')
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        ask(served, M, f'"response_format":{json.dumps(form)}')
        tool = {"type": "function", "function": {"name": "f", "parameters": schema | {"type": "object"}}}
        ask(served, M, f'"tools":[{json.dumps(tool)}],"tool_choice":"required"')


BOMBS = [
    "(a+)+$",
    "(a|a)*b",
    "(a*)*" * 200,
    "(.*)(.*)(.*)(.*)(.*)[^a]",
    "((a{1,100}){1,100}){1,100}",
    "((((a{9}){9}){9}){9}){9}",
    "a{1000000}",
    "a{1,4294967295}",
    "(x{1,1000}y{1,1000}){1,1000}",
    r"\p{L}{1000}",
    r"(\p{L}|\p{N}|\p{S}){0,500}",
    r"[\w\W]{0,5000}",
    "(?:(?:(?:.?){30}){30}){30}",
    "(a?){400}a{400}",
    "|".join(f"a{{{i}}}" for i in range(500)),
    "(?=a)b",
    r"(a)\1",
    "(?P<x>a)(?P=x)",
    "[[:alpha:]-\\u{10FFFF}]" * 100,
    "(" * 2000 + "a" + ")" * 2000,
    "a" * 4096,
    "\\",
    "[",
    "(?i)" * 1000,
    "\x00",
]


@pytest.mark.parametrize("part", swept(range(5), 2))
def test_regex_bombs(served: Live, part: int) -> None:
    """As an expression, in a schema, and in a grammar."""
    for bomb in BOMBS[part::5]:
        ask(served, C, f'"structured_outputs":{{"regex":{json.dumps(bomb)}}}')
        schema = {"type": "string", "pattern": bomb}
        ask(served, C, f'"structured_outputs":{{"json":{json.dumps(schema)}}}')
        written = f"start: /{bomb}/"
        ask(served, C, f'"structured_outputs":{{"grammar":{json.dumps(written)}}}')


LARKS = [
    "start: start",
    "start: start start",
    "start: a\na: b\nb: a",
    'start: "a" start | start "a" | "a"',
    "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "start: " + '"a"? ' * 10_000,
    'start: "a"~1000000',
    'start: ("a"~1..1000)~1..1000',
    "start: " + " | ".join(f'"{i}"' for i in range(8000)),
    "start: " + " ".join(f"r{i}" for i in range(500)) + "\n" + "\n".join(f'r{i}: "a"?' for i in range(500)),
    "start: x\n" + "\n".join(f"x{i}: x{i + 1} x{i + 1}" for i in range(60)) + '\nx60: "a"\nx: x0',
    "%import common.WORD\nstart: WORD",
    '%import "/etc/passwd"\nstart: "a"',
    'start: %json {"$ref": "#"}',
    "start: %json " + nested("[", "", "]", 5000),
    "start: <|im_start|> <[0-400000]>",
    "start: <[4000000000]>",
    'start[temperature=9]: "a"',
    "",
    "start:",
    "\x00",
]


@pytest.mark.parametrize("part", swept(range(4), 2))
def test_grammars_that_grow(served: Live, part: int) -> None:
    for text in LARKS[part::4]:
        ask(served, C, f'"structured_outputs":{{"grammar":{json.dumps(text)}}}')


def test_a_neighbor_has_its_form_all_the_while(served: Live) -> None:
    """Compiling has threads of its own: a queue of bombs must not keep a plain form from being answered at all."""
    for bomb in BOMBS[:4]:
        ask(served, C, f'"structured_outputs":{{"regex":{json.dumps(bomb + "x")}}}')
        result = served.complete(PROMPT, max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
        assert result["choices"][0]["text"] in ("yes", "no")
