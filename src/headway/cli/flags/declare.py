"""How a command declares its flags: `Option` and `Argument` in its annotations, and option objects as groups of flags.

A command with a parameter of a dataclass has a flag for each of its fields, and of theirs:

    @with_flags
    def chat(*, engine_options: EngineOptions, decoding: Decoding = Decoding(max_tokens=512)) -> None: ...

The object that is the parameter's default has the defaults of the flags. Typer reads the declarations through
`for_typer`; `plain` reads them without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

Command = Callable[..., int | None]  # what it returns is the exit code


class BadValue(ValueError):
    """A flag's value that its parser refuses; the message says why."""


class Option:
    """A flag: its names, and what typer's `Option` takes besides."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


class Argument:
    """A value without a name, and what typer's `Argument` takes."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


def panel(title: str) -> Callable[..., Option]:
    """What declares the flags that the help shows under one title."""
    return partial(Option, rich_help_panel=title)


def with_flags(command: Command) -> Command:
    """The command with flags in place of option objects, which it makes of their values."""
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
    def wrapped(*args: Any, **values: Any) -> int | None:
        objects = {name: _object(kind, values) for name, kind in kinds.items()}
        return command(*args, **values, **objects)

    return _declared(wrapped, parameters)


def for_typer(command: Command) -> Command:
    """The command as typer reads it."""
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=_typer_annotation(hints[parameter.name]))
        for parameter in inspect.signature(command).parameters.values()
    ]

    @wraps(command)
    def wrapped(*args: Any, **values: Any) -> int | None:
        return command(*args, **values)

    return _declared(wrapped, parameters)


def _typer_annotation(hint: Any) -> Any:
    import typer

    kind, (declared, *_) = hint.__origin__, hint.__metadata__
    settings = dict(declared.settings)
    if parser := settings.get("parser"):
        settings["parser"] = _typer_parser(parser)
    if isinstance(declared, Option):
        return Annotated[kind, typer.Option(*declared.names, **settings)]
    return Annotated[kind, typer.Argument(**settings)]


def _typer_parser(parser: Callable[[str], Any]) -> Callable[[str], Any]:
    import typer

    def parse(text: str) -> Any:
        try:
            return parser(text)
        except BadValue as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def _declared(wrapped: Command, parameters: list[Parameter]) -> Command:
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
