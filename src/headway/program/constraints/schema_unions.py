"""Choices of a `oneOf`: whether no document satisfies two of them, so that an `anyOf` says the same.

What is said here is sure: choices that could not be told apart may still share no document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headway.program.constraints.schema_keywords import TYPES

Resolve = Callable[[Any], Any]  # a subschema → what its references end in


def told_apart(choices: list[Any], resolve: Resolve) -> bool:
    """Whether all choices are objects that one required property tells apart: the usual oneOf, of any length."""
    if not all(isinstance(choice, dict) and choice.get("type") == "object" for choice in choices):
        return False
    for name in set.intersection(*({*choice.get("required", ())} for choice in choices)):
        each = (_values(choice.get("properties", {}).get(name), resolve) for choice in choices)
        values = [listed for listed in each if listed is not None]
        if len(values) == len(choices) and len(set().union(*values)) == sum(map(len, values)):
            return True
    return False


def are_apart(a: Any, b: Any, resolve: Resolve) -> bool:
    """Whether two schemas surely share no document: they differ in type, in the values they list, or in those of a
    required property, or one requires a property that the other has not."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    kinds = [{kind.replace("integer", "number") for kind in types_of(s.get("type", TYPES))} for s in (a, b)]
    if not kinds[0] & kinds[1] or _differ(a, b, resolve):
        return True
    if kinds != [{"object"}, {"object"}]:
        return False
    required = [{*schema.get("required", ())} for schema in (a, b)]
    if any(_lacks(b, name) for name in required[0]) or any(_lacks(a, name) for name in required[1]):
        return True
    both = required[0] & required[1]
    known = a.get("properties", {}), b.get("properties", {})
    return any(_differ(known[0].get(name), known[1].get(name), resolve) for name in both)


def types_of(value: str | Iterable[str]) -> list[str]:
    """The types of a schema, of which one may stand alone."""
    return [value] if isinstance(value, str) else list(value)


def _differ(a: Any, b: Any, resolve: Resolve) -> bool:
    """Whether two subschemas list values, and none in both."""
    values = _values(a, resolve), _values(b, resolve)
    return values[0] is not None and values[1] is not None and not values[0] & values[1]


def _values(schema: Any, resolve: Resolve) -> set[Any] | None:
    """The values that a subschema lists, if it lists only plain ones. For JSON 1 is 1.0, but not true."""
    schema = resolve(schema)
    if not isinstance(schema, dict) or not {"const", "enum"} & schema.keys():
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not all(value is None or isinstance(value, str | int | float) for value in values):
        return None
    return {(isinstance(value, bool), value) for value in values}


def _lacks(schema: dict[str, Any], name: str) -> bool:
    """Whether no object that satisfies a schema has this property."""
    if name in (properties := schema.get("properties", {})):
        return properties[name] is False
    return schema.get("additionalProperties") is False and "patternProperties" not in schema
