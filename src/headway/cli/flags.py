"""Option objects as flags: a command with a parameter of a dataclass has a flag for each of its fields, and of theirs.

    @with_flags
    def chat(*, engine_options: EngineOptions, decoding: Decoding = Decoding(max_tokens=512)) -> None: ...

The object that is the parameter's default has the defaults of the flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: flags in place of option objects, which it makes of their values."""
    hints = get_type_hints(command, include_extras=True)
    kinds: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            kinds[parameter.name] = kind
            parameters += _flags(kind, parameter.default)
        else:
            parameters.append(parameter.replace(annotation=kind))

    @wraps(command)
    def wrapped(*args: Any, **values: Any) -> None:
        objects = {name: _object(kind, values) for name, kind in kinds.items()}
        command(*args, **values, **objects)

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


def _flags(kind: Any, given: Any) -> list[Parameter]:
    """A parameter for each field, with the value that the given object has there as its default."""
    hints = get_type_hints(kind, include_extras=True)
    defaults = kind() if given is Parameter.empty else given
    flags: list[Parameter] = []
    for field in fields(kind):
        hint, default = hints[field.name], getattr(defaults, field.name)
        if is_dataclass(hint):
            flags += _flags(hint, default)
        else:
            flags.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return flags


def _object(kind: Any, values: dict[str, Any]) -> Any:
    """The object of these flags, which are taken out of `values`."""
    hints = get_type_hints(kind)
    parts = ((f.name, hints[f.name]) for f in fields(kind))
    return kind(**{name: _object(hint, values) if is_dataclass(hint) else values.pop(name) for name, hint in parts})
