"""JSON schemas for constraints: checked keyword by keyword, so that nothing in them is ignored.

`checked_schema` gives back the schema as JSON text for the grammar compiler, with patterns written in its dialect, or
raises and names the place. Keywords that cannot be enforced token by token are refused, and so is one that looks like
a misspelled one, which would constrain nothing; others that no draft knows are annotations. It never resolves anything
outside the schema.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr, shorten
from headway.program.constraints.patterns import ecma_pattern, real_times
from headway.program.constraints.pydantic_schema import is_pydantic, pydantic_schema
from headway.program.constraints.schema_keywords import (
    ANNOTATIONS,
    COUNTS,
    DRAFTS,
    ENFORCED,
    FORMATS,
    IDLE,
    INSTEAD,
    LISTS,
    MAPS,
    NOT_ENFORCED,
    NUMBERS,
    ONE,
    OTHER_FORMATS,
    TYPES,
)
from headway.program.constraints.schema_numbers import check_literal, with_exact_numbers
from headway.program.constraints.schema_unions import are_apart, told_apart, types_of

BYTES = 256 * 1024  # of a schema as JSON text
NODES = 2048  # subschemas, and lists and objects inside const and enum
DEPTH = 100  # of JSON values inside each other
OPTIONAL = 400  # properties of one object that may be left out: each is a choice at every other
HINTS = 200  # names that no draft knows, each compared with those it knows
HINT_LENGTH = 40  # characters of a name that may be a misspelled keyword or format
PAIRS = 20_000  # pairs of choices of oneOf that are compared, in a whole schema
EXACT = 1 << 53  # counts and steps are read as doubles: beyond, integers would be rounded


def checked_schema(schema: Any) -> str:
    """The schema as JSON text. Takes a dict, a bool, JSON text, or a pydantic model class."""
    if is_pydantic(schema):
        schema = pydantic_schema(schema)
    if isinstance(schema, str | bytes):
        schema = _parsed(schema)
    walk = _Walk(schema)
    out = walk.node(schema, "", 0)
    walk.check_references()
    walk.settle_unions()
    if out is False:
        raise InvalidInput("the JSON schema is false: it allows nothing")
    text = json.dumps({} if out is True else out, ensure_ascii=False, allow_nan=False)
    if len(text.encode("utf-8", "surrogatepass")) > BYTES:
        raise InvalidInput(f"the JSON schema has {len(text)} characters; at most {BYTES} bytes are allowed")
    return text


def places_of(keywords: set[str], text: str) -> list[str]:
    """The places where a checked schema has one of these: whether it can be enforced is for the compiler to see."""
    places, todo = [], [("", json.loads(text))]
    while todo:
        at, schema = todo.pop()
        if not isinstance(schema, dict):
            continue
        if keywords & schema.keys():
            places.append(_place(at))
        todo += reversed(list(_subschemas(schema, at)))
    return places


def _subschemas(schema: dict[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside this one, each with its pointer."""
    for keyword, value in schema.items():
        place = f"{at}/{_escaped(keyword)}"
        if keyword in MAPS:
            yield from ((f"{place}/{_escaped(name)}", inner) for name, inner in value.items())
        elif isinstance(value, list) and (keyword in LISTS or keyword == "items"):
            yield from ((f"{place}/{i}", inner) for i, inner in enumerate(value))
        elif keyword in ONE or keyword == "items":
            yield place, value


def _refers(schema: Any) -> bool:
    """Whether there is a $ref somewhere inside a schema."""
    if isinstance(schema, list):
        return any(map(_refers, schema))
    return isinstance(schema, dict) and ("$ref" in schema or any(map(_refers, schema.values())))


class _Walk:
    """One pass over a schema: its keywords, where its subschemas are, and which refer to which."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.nodes: dict[str, Any] = {}  # pointer → subschema
        self.references: dict[str, str] = {}  # pointer of the $ref → pointer it names
        self.unions: list[dict[str, Any]] = []  # rewritten subschemas that have oneOf
        self.targets: dict[str, Any] = {}  # pointer of a $ref → the subschema that it leads to
        self.unknown: set[str] = set()  # keywords and formats that no draft knows
        self.count = 0

    def node(self, schema: Any, at: str, depth: int) -> Any:
        """The subschema at pointer `at`, rewritten."""
        self.step(at, depth)
        schema = self.nodes[at] = self.with_named_properties(schema)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise WrongType(f"the JSON schema has {short_repr(schema)} at {_place(at)}; a schema is an object or bool")
        out = {}
        for keyword, value in _modern(schema).items():
            if not isinstance(keyword, str):
                raise WrongType(f"the JSON schema has the key {short_repr(keyword)} at {_place(at)}; keys are strings")
            if keyword in ENFORCED:
                written = self.keyword(keyword, value, f"{at}/{_escaped(keyword)}", depth + 1)
                if written is not None or keyword == "const":
                    out[keyword] = written
            else:
                self.annotation(keyword, value, at)
        _check_properties(schema, at)
        _drop_idle_counts(out)
        if "oneOf" in out:
            self.unions.append(out)
        return with_exact_numbers(_with_real_times(out), at)

    def with_named_properties(self, schema: Any) -> Any:
        """An object without `propertyNames`, where other keywords say the same about the names of its properties."""
        if not isinstance(schema, dict) or "propertyNames" not in schema or "patternProperties" in schema:
            return schema
        names, given = self.found(schema["propertyNames"]), schema.get("properties", {})
        rest = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
        other = schema.get("additionalProperties", True)
        if _any_name(names):
            return rest
        if (listed := _only_listed(names)) is not None and isinstance(given, dict):
            properties = {name: each for name, each in given.items() if name in listed}
            properties |= {name: other for name in listed if name not in given}
            return rest | {"properties": properties, "additionalProperties": False}
        if (pattern := _only_matched(names)) is not None and not given:
            return rest | {"patternProperties": {pattern: other}, "additionalProperties": False}
        return schema

    def found(self, schema: Any) -> Any:
        """What a $ref names, if it can be found; another schema itself."""
        for _ in range(DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str) or len(schema) > 1:
                break
            value = self.root
            for part in _target(schema["$ref"], "").split("/")[1:]:
                value = value.get(_unescaped(part)) if isinstance(value, dict) else None
            schema = value
        return schema

    def keyword(self, keyword: str, value: Any, at: str, depth: int) -> Any:
        """A keyword's value, rewritten; None for a format that is an annotation."""
        if keyword in ONE or (keyword == "items" and not isinstance(value, list)):
            return self.node(value, at, depth)
        if keyword in LISTS or keyword == "items":
            return [self.node(v, f"{at}/{i}", depth + 1) for i, v in enumerate(_typed(value, list, at))]
        if keyword in MAPS:
            named = _typed(value, dict, at).items()
            written = ecma_pattern if keyword == "patternProperties" else str
            return {written(_typed(k, str, at)): self.node(v, f"{at}/{_escaped(k)}", depth + 1) for k, v in named}
        if keyword == "$ref":
            self.references[at.rpartition("/")[0]] = _target(_typed(value, str, at), at)
        elif keyword in ("const", "enum"):
            self.literal(_typed(value, list, at) if keyword == "enum" else value, at, depth)
        elif keyword == "format":
            return self.format(_typed(value, str, at), at)
        else:
            _check_value(keyword, value, at)
        if keyword in COUNTS:
            assert isinstance(value, int | float)
            return int(value)  # 2.0 is 2
        return ecma_pattern(str(value)) if keyword == "pattern" else value

    def literal(self, value: Any, at: str, depth: int) -> None:
        """A value of const or enum can be written out as it is."""
        match value:
            case dict():
                self.step(at, depth)
                for key, inner in value.items():
                    self.literal(_typed(key, str, at), at, depth + 1)
                    self.literal(inner, at, depth + 1)
            case list():
                self.step(at, depth)
                for inner in value:
                    self.literal(inner, at, depth + 1)
            case str():
                _check_text(value, at)
            case float() if not math.isfinite(value):
                raise InvalidInput(f"{_place(at)} in the JSON schema is {value}, which is not a JSON number")
            case None | bool():
                pass
            case int() | float():
                check_literal(value, _place(at))
            case _:
                raise WrongType(f"{_place(at)} in the JSON schema is {short_repr(value)}, which is not a JSON value")

    def step(self, at: str, depth: int) -> None:
        self.count += 1
        if self.count > NODES:
            raise InvalidInput(f"the JSON schema has more than {NODES} subschemas; simplify it")
        if depth > DEPTH:
            raise InvalidInput(f"the JSON schema is nested deeper than {DEPTH} levels, at {shorten(_place(at), 40)}")

    def check_references(self) -> None:
        for at, target in self.references.items():
            if target not in self.nodes:
                raise InvalidInput(
                    f"$ref at {_place(at)} names #{target}, where this JSON schema has no subschema; "
                    "only places inside it can be named"
                )
        endless = self.endless()
        if endless is not None:
            raise InvalidInput(
                f"the JSON schema allows nothing at {_place(endless)}: it needs itself inside itself, without end; "
                "make a property optional, allow an empty array or add another choice"
            )

    def settle_unions(self) -> None:
        """Where no document satisfies two choices of a oneOf it is an anyOf, which the compiler enforces."""
        pairs = PAIRS
        for schema in self.unions:
            choices = [self.resolved(choice) for choice in schema["oneOf"]]
            if "anyOf" in schema:
                continue
            apart = told_apart(choices, self.resolved)
            if not apart and (count := math.comb(len(choices), 2)) <= pairs:
                pairs -= count
                apart = all(are_apart(a, b, self.resolved) for a, b in combinations(choices, 2))
            if apart:
                schema["anyOf"] = schema.pop("oneOf")

    def resolved(self, schema: Any) -> Any:
        """The subschema that a chain of references ends in; endless ones are refused before."""
        chain = []
        while isinstance(schema, dict) and "$ref" in schema:
            at = _target(schema["$ref"], "")
            if at in self.targets:
                schema = self.targets[at]
                break
            chain.append(at)
            schema = self.nodes[at]
        self.targets.update(dict.fromkeys(chain, schema))
        return schema

    def annotation(self, keyword: str, value: Any, at: str) -> None:
        """A keyword that is not enforced says nothing about the document, as far as is known."""
        if keyword == "$schema":
            if not any(draft in _typed(value, str, at) for draft in DRAFTS):
                raise InvalidInput(f"$schema is {short_repr(value)}; the drafts known are {', '.join(DRAFTS)}")
        elif keyword in ("$id", "id") and at:
            if _refers(self.nodes[at]):
                raise InvalidInput(
                    f"the JSON schema has {keyword} at {_place(at)}, from where the $ref inside would be resolved; it "
                    "may only stand at the top there: take it out"
                )
        elif keyword in NOT_ENFORCED and value is not IDLE.get(keyword, ...):
            if keyword == "uniqueItems" and self.nodes[at].get("maxItems") in (0, 1):
                return
            instead = INSTEAD.get(keyword, "take it out and check it afterwards")
            raise InvalidInput(
                f"the JSON schema has {short_repr(keyword)} at {_place(at)}, which cannot be enforced while "
                f"generating; {instead}"
            )
        elif keyword not in ANNOTATIONS and (meant := self.meant(keyword, ENFORCED)):
            raise InvalidInput(
                f"the JSON schema has {short_repr(keyword)} at {_place(at)}, which is not a keyword; write {meant!r}, "
                "or begin an annotation of your own with x-"
            )

    def format(self, name: str, at: str) -> str | None:
        """The name of a format that is enforced; None for another, which is an annotation."""
        if name in FORMATS:
            return name
        if name in OTHER_FORMATS or self.meant(name, FORMATS):
            raise InvalidInput(
                f"{_place(at)} in the JSON schema is {short_repr(name)}; it must be one of {', '.join(FORMATS)}, which "
                "are enforced, or a name of your own, which is not"
            )
        return None

    def meant(self, name: str, known: Iterable[str]) -> str | None:
        """The known name that an unknown one nearly is. Comparing takes long, so that only some may be compared."""
        if name in self.unknown or name.startswith(("x-", "_")) or len(name) > HINT_LENGTH:
            return None
        self.unknown.add(name)
        if len(self.unknown) > HINTS:
            raise InvalidInput(
                f"the JSON schema has more than {HINTS} different keywords and formats that no draft knows; begin "
                "annotations of your own with x-"
            )
        return next(iter(get_close_matches(name, known, 1, 0.8)), None)

    def endless(self) -> str | None:
        """A subschema that no finite document satisfies, if there is one."""
        waiting: dict[str, set[str]] = defaultdict(set)
        for at, schema in self.nodes.items():
            for other in self.uses(schema, at):
                waiting[other].add(at)
        ends: set[str] = set()
        todo = list(self.nodes)
        while todo:
            at = todo.pop()
            if at not in ends and self.can_end(self.nodes[at], at, ends):
                ends.add(at)
                todo.extend(waiting[at] - ends)
        return next((at for at in self.nodes if at not in ends), None)

    def uses(self, schema: Any, at: str) -> Iterator[str]:
        """The subschemas whose ending matters to this one's."""
        if at in self.references:
            yield self.references[at]
        prefix = f"{at}/"
        for keyword in (*LISTS, *MAPS, *ONE, "items"):
            value = schema.get(keyword) if isinstance(schema, dict) else None
            match value:
                case list():
                    yield from (f"{prefix}{keyword}/{i}" for i in range(len(value)))
                case dict() if keyword in MAPS:
                    yield from (f"{prefix}{keyword}/{_escaped(name)}" for name in value)
                case dict():
                    yield prefix + keyword

    def can_end(self, schema: Any, at: str, ends: set[str]) -> bool:
        if isinstance(schema, bool):
            return True  # what `false` makes impossible, the compiler sees
        if at in self.references and self.references[at] not in ends:
            return False
        if any(f"{at}/allOf/{i}" not in ends for i in range(len(schema.get("allOf", ())))):
            return False
        for keyword in ("anyOf", "oneOf"):
            choices = schema.get(keyword)
            if choices and not any(f"{at}/{keyword}/{i}" in ends for i in range(len(choices))):
                return False
        types = schema.get("type", TYPES)
        return any(self.type_can_end(kind, schema, at, ends) for kind in types_of(types))

    def type_can_end(self, kind: str, schema: dict[str, Any], at: str, ends: set[str]) -> bool:
        if kind == "object":
            known = schema.get("properties", {})
            other = f"{at}/additionalProperties"
            places = (f"{at}/properties/{_escaped(k)}" if k in known else other for k in schema.get("required", ()))
        elif kind == "array":
            first = schema.get("prefixItems", schema["items"] if isinstance(schema.get("items"), list) else ())
            name = "prefixItems" if "prefixItems" in schema else "items"
            least = schema.get("minItems", 0)
            rest = [f"{at}/{'items' if isinstance(schema.get('items'), dict) else 'additionalItems'}"]
            places = [f"{at}/{name}/{i}" for i in range(min(least, len(first)))] + rest * (least > len(first))
        else:
            return True
        return all(place in ends or place not in self.nodes for place in places)


def _parsed(text: str | bytes) -> Any:
    if len(text) > BYTES:
        raise InvalidInput(f"the JSON schema has {len(text)} characters; at most {BYTES} bytes are allowed")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the JSON schema is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidInput(f"the JSON schema is nested deeper than {DEPTH} levels") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"the JSON schema has the key {short_repr(twice)} twice in one object")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise InvalidInput(f"the JSON schema has {name}, which is not a JSON number")


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """A subschema with the bounds of draft 4, where "exclusiveMinimum": true changes "minimum", in today's form."""
    out = dict(schema)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(out.get(exclusive), bool) and out.pop(exclusive) and bound in out:
            out[exclusive] = out.pop(bound)
    return out


def _check_value(keyword: str, value: Any, at: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword in COUNTS:
        good = number and 0 <= value < EXACT and float(value).is_integer()
        wanted = f"an integer in [0, {EXACT - 1}]"
    elif keyword in NUMBERS:
        good = number and (isinstance(value, int) or math.isfinite(value))
        good = good and (keyword != "multipleOf" or 0 < value <= EXACT)
        wanted = "a number" if keyword != "multipleOf" else f"a number above 0, up to {EXACT}"
    elif keyword == "type":
        kinds = value if isinstance(value, list) else [value]
        good = bool(kinds) and all(isinstance(kind, str) and kind in TYPES for kind in kinds)
        wanted = f"one or a list of {', '.join(TYPES)}"
    elif keyword == "required":
        good, wanted = isinstance(value, list) and all(isinstance(v, str) for v in value), "a list of property names"
    else:
        good, wanted = isinstance(value, str), "a string"
    if not good:
        raise InvalidInput(f"{_place(at)} in the JSON schema is {short_repr(value)}; it must be {wanted}")


def _check_properties(schema: dict[str, Any], at: str) -> None:
    """Names outside `properties` may repeat in a document, so at most one of them can be counted."""
    required = set(schema.get("required", ()))
    optional = len(schema.get("properties", {}).keys() - required)
    if optional > OPTIONAL:
        raise InvalidInput(
            f"{optional} properties at {_place(at)} are optional; at most {OPTIONAL} may be: require some"
        )
    least, sure = schema.get("minProperties", 0), len(required)
    if least > sure + 1:
        raise InvalidInput(
            f"minProperties at {_place(at)} is {least} with {sure} required; at most one more than those required "
            "can be enforced: list the properties and require them"
        )


def _drop_idle_counts(schema: dict[str, Any]) -> None:
    """Take out counts that every object satisfies anyway; the compiler refuses them beside optional properties."""
    required = set(schema.get("required", ()))
    if schema.get("minProperties", math.inf) <= len(required):
        del schema["minProperties"]
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if closed and schema.get("maxProperties", 0) >= len(required | schema.get("properties", {}).keys()):
        schema.pop("maxProperties", None)


def _check_text(text: str, at: str) -> None:
    for c in text:
        if (c < " " and c not in "\b\t\n\f\r") or c == "\x7f" or "\ud800" <= c <= "\udfff":
            raise InvalidInput(
                f"{_place(at)} in the JSON schema has the character U+{ord(c):04X}, which is never generated"
            )


def _only_listed(schema: Any) -> list[str] | None:
    """The strings that a subschema lists, if that is all it says."""
    if not isinstance(schema, dict) or not schema.keys() <= {"const", "enum", "type", *ANNOTATIONS}:
        return None
    listed: Any = schema["enum"] if "enum" in schema else [schema.get("const")]
    alone = schema.get("type", "string") == "string" and not {"const", "enum"} <= schema.keys()
    return listed if alone and isinstance(listed, list) and all(isinstance(each, str) for each in listed) else None


def _any_name(schema: Any) -> bool:
    """Whether every name of a property satisfies this subschema."""
    if not isinstance(schema, dict):
        return schema is True
    return schema.keys() <= {"type", *ANNOTATIONS} and schema.get("type", "string") == "string"


def _only_matched(schema: Any) -> str | None:
    """The pattern of the names that satisfy a subschema, if that is all it says; a length is one too."""
    if not isinstance(schema, dict) or schema.get("type", "string") != "string":
        return None
    says = schema.keys() - {"type", *ANNOTATIONS}
    if says == {"pattern"}:
        return schema["pattern"] if isinstance(schema["pattern"], str) else None
    counts = [schema[name] for name in ("minLength", "maxLength") if name in schema]
    if (
        says <= {"minLength", "maxLength"}
        and all(type(n) is int and n >= 0 for n in counts)
        and counts == sorted(counts)
    ):
        return f"^[^\\x00]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}$"
    return None


def _with_real_times(schema: dict[str, Any]) -> dict[str, Any]:
    more = [{"pattern": pattern} for pattern in real_times(schema.get("format"))]
    return schema | {"allOf": [*schema.get("allOf", ()), *more]} if more else schema


def _target(reference: str, at: str) -> str:
    """The pointer inside this schema that a $ref names."""
    if reference != "#" and not reference.startswith("#/"):
        raise InvalidInput(
            f"$ref at {_place(at)} is {short_repr(reference)}; only places inside the schema are read, as #/$defs/a"
        )
    return "".join(f"/{_escaped(part)}" for part in map(_unescaped, unquote(reference[1:]).split("/")[1:]))


def _typed(value: Any, kind: type, at: str) -> Any:
    if not isinstance(value, kind):
        names = {list: "a list", dict: "an object", str: "a string"}
        raise WrongType(f"{_place(at)} in the JSON schema is {short_repr(value)}; it must be {names[kind]}")
    return value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _place(at: str) -> str:
    shown = at if len(at) <= 200 else at[:199] + "…"
    return f"#{shown}" if at else "the top"
