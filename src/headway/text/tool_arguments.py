"""Checks a call's arguments against the JSON schema of its tool, with a sentence for what is wrong.

Checked are types, enum and const, required and additional properties, items, unions, references inside the schema,
and bounds of numbers and lengths, but not `pattern` or `format`. A constrained generation is the strict way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr, shorten

MAX_DEPTH = 64
MAX_STEPS = 100_000  # comparisons with a schema, which may refer to itself
_ROOT = "the object of arguments"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


def check_arguments(schema: Mapping[str, Any], arguments: Any) -> None:
    """Raise `InvalidInput`, with a sentence for the model to read, if `arguments` do not fit.

    `schema` is a tool's, as `tool_schema` returns it, or that of its parameters alone.
    """
    name, parameters = "the call", schema
    if isinstance(schema, Mapping) and isinstance(function := schema.get("function"), Mapping):
        name, parameters = f"the call of {function.get('name')}", function.get("parameters", {})
    if not isinstance(parameters, Mapping):
        raise WrongType(f"the schema of {name} is a {type(parameters).__name__}; it must be a dict")
    try:
        why = wrong_value({"type": "object", **parameters}, arguments, _ROOT)
    except (TypeError, AttributeError, KeyError) as error:
        if isinstance(error, WrongType):
            raise
        raise InvalidInput(f"the schema of {name} cannot be read: {type(error).__name__}: {error}") from error
    if why is not None:
        raise InvalidInput(f"{name} does not fit: {why}")


def wrong_value(schema: Mapping[str, Any], value: Any, where: str) -> str | None:
    """What is wrong with `value`, in a sentence that calls it `where`; None if it fits."""
    return _Check(schema).wrong(schema, value, where, 0)


class _Check:
    """Checks values against one schema; each method returns a sentence, or None if the value fits."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps = 0

    def wrong(self, schema: Any, value: Any, where: str, depth: int) -> str | None:
        self._steps += 1
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{where} goes deeper than {MAX_DEPTH} levels of its schema")
        if self._steps > MAX_STEPS:
            raise InvalidInput(f"{where} takes more than {MAX_STEPS:,} comparisons with its schema")
        if schema is True or schema is False:
            return None if schema else f"{where} should not be there"
        if not isinstance(schema, Mapping):
            raise WrongType(f"the schema of {where} is {short_repr(schema)}; it must be a dict")
        return (
            self._wrong_kind(schema, value, where)
            or self._wrong_choice(schema, value, where)
            or self._wrong_bounds(schema, value, where)
            or self._wrong_inside(schema, value, where, depth)
            or self._wrong_variant(schema, value, where, depth)
        )

    def _wrong_kind(self, schema: Mapping[str, Any], value: Any, where: str) -> str | None:
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        for kind in kinds:
            if kind not in _TYPES:
                raise InvalidInput(
                    f"the schema of {where} has the type {short_repr(kind, 40)}; JSON has {', '.join(_TYPES)}"
                )
        if not kinds or any(_is_kind(value, kind) for kind in kinds):
            return None
        return f"{where} is {_show(value)}; it should be {_article(kinds)}"

    def _wrong_choice(self, schema: Mapping[str, Any], value: Any, where: str) -> str | None:
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices is None or any(_same(value, choice) for choice in choices):
            return None
        shown = ", ".join(_show(choice) for choice in choices[:20]) + (", …" if len(choices) > 20 else "")
        return f"{where} is {_show(value)}; it should be {'one of ' if len(choices) != 1 else ''}{shown}"

    def _wrong_bounds(self, schema: Mapping[str, Any], value: Any, where: str) -> str | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            for key, fits in _BOUNDS.items():
                if key in schema and not fits(value, schema[key]):
                    return f"{where} is {_show(value)}; its {key} is {schema[key]}"
        for kind, low, high in ((str, "minLength", "maxLength"), (list, "minItems", "maxItems")):
            if isinstance(value, kind) and not schema.get(low, 0) <= len(value) <= schema.get(high, len(value)):
                limits = " and ".join(f"{key} {schema[key]}" for key in (low, high) if key in schema)
                return f"{where} has the length {len(value)}; the limits are {limits}"
        return None

    def _wrong_inside(self, schema: Mapping[str, Any], value: Any, where: str, depth: int) -> str | None:
        if isinstance(value, dict):
            return self._wrong_object(schema, value, where, depth)
        if isinstance(value, list) and "items" in schema:
            problems = (self.wrong(schema["items"], one, f"{where}[{i}]", depth + 1) for i, one in enumerate(value))
            return next(filter(None, problems), None)
        return None

    def _wrong_object(self, schema: Mapping[str, Any], value: dict[str, Any], where: str, depth: int) -> str | None:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key in schema.get("required", ()):
            if key not in value:
                return f"{where} has no {key!r}, which is required"
        for key, inner in value.items():
            if key not in properties and others is False:
                known = f"it takes {', '.join(map(repr, properties))}" if properties else "it takes none"
                return f"{where} has {key[:40]!r}, which is not known; {known}"
            inside = f"{key[:40]!r}" if where == _ROOT else f"{where}[{key[:40]!r}]"
            if why := self.wrong(properties.get(key, others), inner, inside, depth + 1):
                return why
        return None

    def _wrong_variant(self, schema: Mapping[str, Any], value: Any, where: str, depth: int) -> str | None:
        if "$ref" in schema and (why := self.wrong(self._resolve(schema["$ref"]), value, where, depth + 1)):
            return why
        for part in schema.get("allOf", ()):
            if why := self.wrong(part, value, where, depth + 1):
                return why
        for word in ("anyOf", "oneOf"):
            problems = [self.wrong(part, value, where, depth + 1) for part in schema.get(word, ())]
            if problems and all(problems):
                return (
                    problems[0]
                    if len(problems) == 1
                    else f"{where} is {_show(value)}; none of its {len(problems)} forms fits"
                )
            if word == "oneOf" and problems.count(None) > 1:
                return f"{where} is {_show(value)}; it fits {problems.count(None)} of its forms and should fit one"
        return None

    def _resolve(self, reference: Any) -> Any:
        node: Any = self._root
        start, *steps = str(reference).split("/")
        for step in (step.replace("~1", "/").replace("~0", "~") for step in steps):
            node = node.get(step) if isinstance(node, Mapping) else None
        if start != "#" or node is None:
            raise InvalidInput(f"the schema refers to {short_repr(reference)}, which is not inside it")
        return node


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _same(value: Any, choice: Any) -> bool:
    return isinstance(value, bool) == isinstance(choice, bool) and value == choice


def _article(kinds: list[str]) -> str:
    return " or ".join(kind if kind == "null" else f"{'an' if kind[0] in 'aio' else 'a'} {kind}" for kind in kinds)


def _show(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False, default=repr), 60)
