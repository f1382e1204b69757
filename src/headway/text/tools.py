"""Python functions as tools: their JSON schema, and a call's arguments as Python values.

`tool_schema` reads a function's annotations and docstring, `check_arguments` checks the arguments of a call, and
`bind_arguments` converts them to the annotated types.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr
from headway.text.tool_arguments import check_arguments, wrong_value

__all__ = ["bind_arguments", "check_arguments", "tool_schema"]

MAX_DEPTH = 32
_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


# --- a function as a schema


def tool_schema(fn: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function, in the form of an OpenAI tool.

    The first paragraph of the docstring describes it, the lines under `Args:` (Google style) or the text in
    `Annotated[T, "…"]` its parameters. A parameter with a default is optional. An annotation without a JSON schema
    raises `InvalidInput` with the name of the parameter.
    """
    name, parameters = _signature(fn)
    description, described = _docstring(inspect.getdoc(fn) or "")
    if unknown := set(described) - set(parameters):
        raise InvalidInput(f"the docstring of {name} describes {sorted(unknown)}, which are not its parameters")
    properties = {}
    for key, parameter in parameters.items():
        schema = _schema(parameter.annotation, f"the parameter {key!r} of {name}", 0)
        properties[key] = _with_notes(schema, described.get(key), parameter.default)
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": _object(properties, required)},
    }


def _signature(fn: Callable[..., Any]) -> tuple[str, dict[str, inspect.Parameter]]:
    """A function's name and its parameters, with their annotations resolved."""
    name = getattr(fn, "__name__", None)
    if not callable(fn) or isinstance(fn, type) or not isinstance(name, str):
        raise WrongType(f"a tool must be a named function, not {short_repr(fn)}")
    if not name.isidentifier():
        raise InvalidInput(f"the function is called {name!r}; a tool needs a name, so use def")
    hints = _hints(fn, name)
    arguments = {}
    for key, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidInput(f"the parameter {str(parameter)!r} of {name} cannot be passed by name, as tools require")
        if key not in hints:
            raise InvalidInput(f"the parameter {key!r} of {name} has no annotation; write its type, as in {key}: str")
        arguments[key] = parameter.replace(annotation=hints[key])
    return name, arguments


def _hints(of: Any, name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of, include_extras=True)
    except Exception as error:  # from evaluating an annotation written as text
        raise InvalidInput(f"the annotations of {name} cannot be read: {type(error).__name__}: {error}") from error


def _with_notes(schema: dict[str, Any], description: str | None, default: Any) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if description is not None:
        notes["description"] = description
    if default is not inspect.Parameter.empty and _is_json(plain := _unbuild(default)):
        notes["default"] = plain
    return {**schema, **notes}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _unbuild(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _schema(annotation: Any, where: str, depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise InvalidInput(f"{where} is nested deeper than {MAX_DEPTH} levels, or contains itself")
    if annotation in (None, Any):
        return {} if annotation is Any else {"type": "null"}
    if isinstance(annotation, type) and annotation in _PLAIN:
        return {"type": _PLAIN[annotation]}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _annotated(annotation, where, depth)
    if origin is Literal:
        return _choices(list(arguments), where)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(one, where, depth + 1) for one in arguments]}
    if annotation is list or origin is list:
        return {"type": "array", **({"items": _schema(arguments[0], where, depth + 1)} if arguments else {})}
    if annotation is dict or origin is dict:
        return _mapping(arguments, where, depth)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _choices([member.value for member in annotation], where)
    return _record(annotation, where, depth)


def _annotated(annotation: Any, where: str, depth: int) -> dict[str, Any]:
    schema = _schema(annotation.__origin__, where, depth)
    texts = [note for note in annotation.__metadata__ if isinstance(note, str)]
    return {**schema, **({"description": texts[0]} if texts else {})}


def _choices(values: list[Any], where: str) -> dict[str, Any]:
    for value in values:
        if type(value) not in _PLAIN:
            raise InvalidInput(
                f"{where} has the choice {short_repr(value)}; choices are text, numbers, booleans or None"
            )
    kinds = sorted({_PLAIN[type(value)] for value in values})
    return {**({"type": kinds[0]} if len(kinds) == 1 else {}), "enum": values}


def _mapping(arguments: tuple[Any, ...], where: str, depth: int) -> dict[str, Any]:
    if not arguments:
        return {"type": "object"}
    if arguments[0] is not str:
        raise InvalidInput(f"{where} is a dict with keys of {short_repr(arguments[0])}; keys in JSON are str")
    return {"type": "object", "additionalProperties": _schema(arguments[1], where, depth + 1)}


def _record(annotation: Any, where: str, depth: int) -> dict[str, Any]:
    """The schema of a dataclass or TypedDict."""
    fields = _fields(annotation)
    if fields is None:
        raise InvalidInput(
            f"{where} is annotated {_spell(annotation)}, which has no JSON schema; use str, int, float, bool, list, "
            "dict, Literal, Enum, unions of these, a dataclass or a TypedDict"
        )
    properties = {key: _schema(kind, f"{key!r} in {where}", depth + 1) for key, (kind, _) in fields.items()}
    return _object(properties, [key for key, (_, required) in fields.items() if required])


def _fields(annotation: Any) -> dict[str, tuple[Any, bool]] | None:
    """The fields of a dataclass or TypedDict: each one's type and whether it is required. None for other types."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        hints, missing = _hints(annotation, annotation.__name__), dataclasses.MISSING
        listed = [field for field in dataclasses.fields(annotation) if field.init]
        return {f.name: (hints[f.name], f.default is missing and f.default_factory is missing) for f in listed}
    if typing.is_typeddict(annotation):
        hints = _hints(annotation, annotation.__name__)
        return {key: _entry(kind, key in annotation.__required_keys__) for key, kind in hints.items()}
    return None


def _entry(annotation: Any, required: bool) -> tuple[Any, bool]:
    """A TypedDict's entry; Required[…] and NotRequired[…] count, which annotations kept as text hide until now."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Required, typing.NotRequired):
        return typing.get_args(annotation)[0], origin is typing.Required
    return annotation, required


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _spell(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else repr(annotation)[:80]


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the text for each name under `Args:`."""
    first = re.split(r"\n\s*\n|\n(?=(?:Args|Arguments|Parameters|Returns|Raises):)", text.strip())[0]
    section = re.search(
        r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+\S.*(?:\n|$)|[ \t]*\n)*)", text, re.MULTILINE
    )
    described: dict[str, str] = {}
    if section is not None:
        lines = inspect.cleandoc("\n" + section[1]).splitlines()
        key = ""
        for line in lines:
            entry = re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
            if entry is not None:
                key = entry[1]
            if key:
                described[key] = f"{described.get(key, '')} {entry[2] if entry is not None else line.strip()}".strip()
    return " ".join("" if first.startswith(("Args:", "Arguments:", "Parameters:")) else first.split()), described


# --- arguments as Python values


def bind_arguments(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments for `fn`, converted to its annotations: enums, dataclasses, floats.

    Arguments that do not fit raise `InvalidInput`, as in `check_arguments`.
    """
    check_arguments(tool_schema(fn), dict(arguments))
    name, parameters = _signature(fn)
    try:
        return {key: _build(parameters[key].annotation, value) for key, value in arguments.items()}
    except Exception as error:  # e.g. a dataclass that raises, or an int too large for a float
        kind = "" if isinstance(error, ValueError | TypeError | OverflowError) else f"{type(error).__name__}: "
        raise InvalidInput(f"the call of {name} does not fit: {kind}{error}".removesuffix(": ")) from error


def _build(annotation: Any, value: Any) -> Any:
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _build(annotation.__origin__, value)
    if origin in (Union, types.UnionType):
        return _build(next(one for one in inside if _fits(one, value)), value)
    if annotation in (int, float):
        return annotation(value)
    if origin is list and inside:
        return [_build(inside[0], one) for one in value]
    if origin is dict and inside:
        return {key: _build(inside[1], one) for key, one in value.items()}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation(value)
    fields = _fields(annotation)
    if fields is None:
        return value
    built = {key: _build(fields[key][0], one) for key, one in value.items()}
    return built if typing.is_typeddict(annotation) else annotation(**built)


def _fits(annotation: Any, value: Any) -> bool:
    return wrong_value(_schema(annotation, "a form", 0), value, "it") is None
