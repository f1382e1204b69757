"""Two hundred JSON schemas, by theme: each combines a few keywords, from single values to recursive documents."""

from __future__ import annotations

from itertools import count, pairwise, product
from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string", "maxLength": 12}
LEAVES: list[Schema] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    STRING,
    {"enum": ["red", "green", "blue"]},
    {"const": 42},
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
]


def obj(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object that requires every property and allows no other, unless told otherwise."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def array(items: Any, low: int = 0, high: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high, **more}


def schemas() -> dict[str, Schema]:
    """All of them, by a name that says the theme."""
    themes = {
        "integer": _integers(),
        "number": _numbers(),
        "string": _strings(),
        "pattern": _patterns(),
        "format": [{"type": "string", "format": f} for f in ("date", "date-time", "time", "ipv4", "ipv6", "uuid")],
        "literal": _literals(),
        "unicode": _unicode(),
        "array": _arrays(),
        "tuple": _tuples(),
        "object": _objects(),
        "extra": _extra(),
        "union": _unions(),
        "merged": _merged(),
        "nested": _nested(),
        "reference": _references(),
        "document": _documents(),
        "mixed": _mixed(),
    }
    return {f"{theme}-{i}": schema for theme, members in themes.items() for i, schema in zip(count(), members)}


def _integers() -> list[Schema]:
    bounds = [(0, 9), (-5, 5), (1, 1), (10, 99), (-1000, -1), (0, 255), (7, 12345), (99, 101), (-(2**31), 2**31 - 1)]
    ranged = [{"type": "integer", "minimum": low, "maximum": high} for low, high in bounds]
    open_ended = [
        {"minimum": 0},
        {"maximum": 0},
        {"exclusiveMinimum": 3, "exclusiveMaximum": 7},
        {"exclusiveMinimum": -1},
    ]
    multiples = [{"multipleOf": 5, "minimum": 0, "maximum": 100}, {"multipleOf": 7}]
    return ranged + [{"type": "integer", **bound} for bound in open_ended + multiples]


def _numbers() -> list[Schema]:
    bounds: list[Schema] = [
        {},
        {"minimum": 0, "maximum": 1},
        {"minimum": -0.5, "maximum": 0.5},
        {"exclusiveMinimum": 0, "maximum": 10},
        {"minimum": 0, "exclusiveMaximum": 360},
        {"minimum": 98.6, "maximum": 104.25},
        {"minimum": -273.15},
        {"maximum": -1.5},
        {"minimum": 1e-3, "maximum": 1e3},
        {"exclusiveMinimum": 2.5, "exclusiveMaximum": 2.75},
        {"multipleOf": 0.5, "minimum": 0, "maximum": 20},
    ]
    return [{"type": "number", **bound} for bound in bounds]


def _strings() -> list[Schema]:
    lengths = [(0, 0), (0, 1), (1, 1), (3, 5), (0, 40), (10, 10), (2, 200)]
    return [{"type": "string", "minLength": low, "maxLength": high} for low, high in lengths] + [
        {"type": "string"},
        {"type": "string", "minLength": 4},
    ]


def _patterns() -> list[Schema]:
    patterns = [
        "^[A-Z][a-z]{2,8}$",
        "^[0-9]{3}-[0-9]{4}$",
        "^(foo|bar|baz)+$",
        "^#[0-9a-f]{6}$",
        r"^\d{1,3}(\.\d{1,3}){3}$",
        r"^\w{3,8}$",
        r"^\S+ \S+$",
        r"^a.b$",
        "ab",
        "^x",
        "y$",
        r"^[^\s,]+(,[^\s,]+){0,2}$",
        "^[a&b~[]{2}$",
        "^(?:[01][0-9]|2[0-3]):[0-5][0-9]$",
        "^v[0-9]+(\\.[0-9]+){2}$",
    ]
    lengths: list[Schema] = [{}, {"maxLength": 20}]
    plain = [{"type": "string", "pattern": p, **more} for p, more in zip(patterns, lengths * len(patterns))]
    return [*plain, {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 4}]


def _literals() -> list[Schema]:
    return [
        {"const": None},
        {"const": 'a "quoted" \\ text\n'},
        {"const": {"a": [1, 2.5, {"b": None}], "c": ""}},
        {"const": []},
        {"const": -17},
        {"const": 0.1},
        {"enum": ["a", "ab", "abc"]},
        {"enum": [1, "1", True, None, [1], {"one": 1}]},
        {"enum": [10, 100, 1000, -10]},
        {"enum": [f"option {i}" for i in range(60)]},
        {"type": "string", "enum": ["north", "south", "east", "west"]},
        {"type": "integer", "enum": [1, 2, 3]},
    ]


def _unicode() -> list[Schema]:
    return [
        {"enum": ["größer", "日本語", "🙂", "Ελλάδα", "a\u0301"]},
        {"const": "🏳️‍🌈 zwj"},
        obj({"größe": {"type": "integer"}, "名前": STRING, "🙂": {"type": "boolean"}}),
        obj({'with "quotes"': {"type": "null"}, "back\\slash": {"type": "null"}, "new\nline": {"type": "null"}}),
        {"type": "string", "pattern": "^[α-ω]{2,6}$"},
        {"type": "string", "pattern": "^日本?語?$"},
        {"type": "string", "pattern": "^[^ -~]{3}$"},
        {"type": "string", "minLength": 2, "maxLength": 2, "pattern": "^[🌍🌎🌏é]+$"},
        {"type": "object", "properties": {"é": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
    ]


def _arrays() -> list[Schema]:
    by_leaf = [array(leaf, low, high) for leaf, (low, high) in product(LEAVES[:6], ((0, 2), (2, 4)))]
    return [
        *by_leaf,
        array({"type": "integer"}, 0, 0),
        array({"type": "integer", "minimum": 0, "maximum": 9}, 9, 9),
        array(array({"type": "integer"}, 1, 2), 2, 2),
        array({"enum": [0, 1]}, 0, 30),
        array(True, 0, 2),
        {"type": "array", "maxItems": 2},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 3},
    ]


def _tuples() -> list[Schema]:
    return [
        {"type": "array", "prefixItems": [{"type": "integer"}, STRING], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [{"type": "integer"}, STRING], "items": False},
        {"type": "array", "prefixItems": [{"enum": ["+", "-"]}], "items": {"type": "integer"}, "maxItems": 3},
        {"type": "array", "prefixItems": LEAVES[:5], "minItems": 5, "maxItems": 5},
        {
            "type": "array",
            "prefixItems": [{"const": "point"}, {"type": "number"}, {"type": "number"}],
            "minItems": 3,
            "items": False,
        },
    ]


def _objects() -> list[Schema]:
    single = [obj({"value": leaf}) for leaf in LEAVES]
    pairs = [obj({"a": a, "b": b}, ["b"]) for a, b in zip(LEAVES, LEAVES[3:])]
    return [
        *single,
        *pairs,
        obj({}),
        obj({f"p{i}": LEAVES[i % 8] for i in range(12)}, []),
        obj({f"p{i}": LEAVES[i % 8] for i in range(12)}, ["p3", "p11"]),
        obj({"a": {"type": "integer"}, "b": {"type": "integer"}}, [], minProperties=1),
        obj({"a": {"type": "integer"}, "never": False}, ["a"]),
        obj({"a": True}),
    ]


def _extra() -> list[Schema]:
    integer: Schema = {"type": "integer"}
    return [
        {"type": "object", "maxProperties": 3},
        {"type": "object", "additionalProperties": integer, "maxProperties": 4},
        {"type": "object", "properties": {"id": integer}, "required": ["id"], "additionalProperties": STRING},
        {"type": "object", "properties": {"id": integer}, "additionalProperties": {"enum": ["x"]}},
        {"type": "object", "patternProperties": {"^x-[a-z]{1,4}$": integer}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^n": integer, "^s": STRING}, "additionalProperties": False},
        {"type": "object", "required": ["unlisted"], "additionalProperties": integer},
        {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
        {"type": "object", "required": ["a", "b"], "properties": {"a": integer, "b": integer}, "minProperties": 3},
    ]


def _unions() -> list[Schema]:
    circle = obj({"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}})
    square = obj({"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1}})
    anys = [{"anyOf": [a, b]} for a, b in pairwise(LEAVES)]
    ones = [{"oneOf": [a, b]} for a, b in ((LEAVES[0], LEAVES[4]), (LEAVES[2], LEAVES[3]), (circle, square))]
    return [
        *anys,
        *ones,
        {"type": ["string", "null"], "maxLength": 5},
        {"type": ["integer", "boolean", "array"], "maxItems": 1},
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        {"anyOf": [circle, square, {"type": "null"}]},
        {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 300}]},
        obj({"shape": {"anyOf": [circle, square]}, "tags": array({"anyOf": LEAVES[:3]})}),
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "additionalProperties": False, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ]  # fmt: skip


def _merged() -> list[Schema]:
    named: Schema = {"type": "object", "properties": {"name": STRING}, "required": ["name"]}
    aged: Schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
    return [
        {"allOf": [named, aged, {"maxProperties": 2}]},
        {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 20}]},
        {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}, {"pattern": "^[xyz]"}]},
        {"type": "integer", "minimum": 1, "allOf": [{"multipleOf": 3}, {"maximum": 30}]},
        {"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["b", "c", "d"]}]},
    ]


def _nested() -> list[Schema]:
    out = []
    for depth, leaf in zip((2, 3, 4, 5, 6, 8), LEAVES):
        inside: Schema = leaf
        for level in range(depth):
            inside = obj({f"level{level}": inside}) if level % 2 else array(inside, 1, 2)
        out.append(inside)
    matrix = array(array({"type": "integer", "minimum": 0, "maximum": 1}, 3, 3), 3, 3)
    return [*out, matrix, obj({"rows": matrix, "name": STRING}), obj({"a": obj({"b": obj({"c": obj({"d": STRING})})})})]


def _references() -> list[Schema]:
    point = obj({"x": {"type": "integer"}, "y": {"type": "integer"}})
    tree = obj({"value": {"type": "integer"}, "children": array({"$ref": "#/$defs/tree"}, 0, 2)})
    chain = obj({"value": {"enum": [0, 1]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]}})
    even = array({"$ref": "#/$defs/odd"}, 0, 1)
    odd = array({"$ref": "#/$defs/even"}, 0, 1)
    return [
        {"$defs": {"point": point}, "$ref": "#/$defs/point"},
        {"$defs": {"point": point}, **array({"$ref": "#/$defs/point"}, 1, 2)},
        {"definitions": {"point": point},
         **obj({"from": {"$ref": "#/definitions/point"}, "to": {"$ref": "#/definitions/point"}})},
        {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"},
        {"$defs": {"chain": chain}, "$ref": "#/$defs/chain"},
        {"$defs": {"even": even, "odd": odd}, "$ref": "#/$defs/even"},
        obj({"self": {"$ref": "#"}, "v": {"type": "integer"}}, ["v"]),
        {"$defs": {"a/b": {"type": "integer"}, "c~d": STRING},
         **obj({"p": {"$ref": "#/$defs/a~1b"}, "q": {"$ref": "#/$defs/c~0d"}})},
        obj({"first": {"type": "integer", "minimum": 0}, "second": {"$ref": "#/properties/first"}}),
        {"$defs": {"short": {"type": "string", "maxLength": 4}},
         **obj({"a": {"$ref": "#/$defs/short", "minLength": 2}})},
        {"$defs": {"a": obj({"kind": {"const": "a"}}), "b": obj({"kind": {"const": "b"}})},
         "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "kind"}},
    ]  # fmt: skip


def _documents() -> list[Schema]:
    money = obj({"amount": {"type": "number", "minimum": 0, "multipleOf": 0.01}, "currency": {"enum": ["EUR", "USD"]}})
    address = obj({"street": STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "country": STRING}, ["street"])
    item = obj(
        {"sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "count": {"type": "integer", "minimum": 1}}
    )
    return [
        {"title": "Person", "description": "someone", **obj({"name": STRING, "age": {"type": "integer", "minimum": 0,
         "maximum": 150}, "email": {"type": "string", "format": "email"}}, ["name", "age"])},
        obj({"order": {"type": "string", "format": "uuid"},
             "items": array(item, 1, 3), "total": money, "ship": address}),
        obj({"name": {"enum": ["search", "stop"]}, "arguments": {"type": "object", "maxProperties": 2}}),
        obj({"sentiment": {"enum": ["good", "bad", "mixed"]}, "score": {"type": "number", "minimum": 0, "maximum": 1},
             "reasons": array(STRING, 1, 3)}),
        obj({"born": {"type": "string", "format": "date"}, "seen": {"type": "string", "format": "date-time"}}),
        obj({"steps": array(obj({"n": {"type": "integer"}, "do": STRING, "ok": {"type": ["boolean", "null"]}}), 1, 3)}),
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "$comment": "c", "examples": [1],
         **obj({"ip": {"type": "string", "format": "ipv4"},
                "port": {"type": "integer", "minimum": 1, "maximum": 65535}})},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": {"type": "integer", "default": 3}},
         **obj({"a": {"$ref": "#/definitions/n"}, "b": array({"$ref": "#/definitions/n"})}, ["b"])},
    ]  # fmt: skip


def _mixed() -> list[Schema]:
    wide = [
        obj(
            {
                "many": array(leaf, 1, 2),
                "maybe": {"anyOf": [leaf, {"type": "null"}]},
                "map": {"type": "object", "additionalProperties": leaf, "maxProperties": 2},
            },
            ["many"],
        )
        for leaf in LEAVES
    ]
    return wide + [array(obj({"k": a, "v": b}, ["k"]), 1, 2) for a, b in product(LEAVES[:4], LEAVES[4:7])]
