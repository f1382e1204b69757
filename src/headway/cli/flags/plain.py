"""Plain command lines, read without typer, whose imports take longer than everything else that precedes a model.

`values` understands exact names, values after a space or an equals sign, switches and arguments. Anything else
(help, a mistake, several letters in one) it leaves to typer, which reads the same declarations and reports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from headway.cli.flags.declare import Command, Option

PLAIN = {"metavar", "help", "rich_help_panel", "parser", "callback"}  # settings that are understood here


class _NotPlain(Exception):
    """Typer has to read this command line."""


class _Parameter:
    """One parameter of a command: what its text means, and what it becomes."""

    def __init__(self, name: str, hint: Any, default: Any) -> None:
        self.name, self.default = name, default
        declared = hint.__metadata__[0]
        kinds = get_args(hint.__origin__) if get_origin(hint.__origin__) in (Union, UnionType) else (hint.__origin__,)
        (kind,) = (each for each in kinds if each is not NoneType)
        if not set(declared.settings) <= PLAIN or (declared.settings.get("parser") is None and kind in (int, float)):
            raise _NotPlain
        self.names: tuple[str, ...] = declared.names if isinstance(declared, Option) else ()
        self.is_argument = not isinstance(declared, Option)
        self.is_switch, self.repeats = kind is bool, get_origin(kind) is list
        self.callback: Callable[[Any], Any] | None = declared.settings.get("callback")
        self.parse: Callable[[str], Any] = declared.settings.get("parser") or (Path if kind is Path else str)
        if self.is_switch and (default is not False or any("/" in name for name in self.names)):
            raise _NotPlain
        if self.is_argument and self.repeats:
            raise _NotPlain


def values(command: Command, arguments: list[str]) -> dict[str, Any] | None:
    """The values of the command's parameters; None if this is for typer to read."""
    try:
        return _values(_parameters(command), arguments)
    except (_NotPlain, ValueError):
        return None


def _parameters(command: Command) -> list[_Parameter]:
    hints = get_type_hints(command, include_extras=True)
    return [
        _Parameter(name, hints[name], parameter.default)
        for name, parameter in inspect.signature(command).parameters.items()
    ]


def _values(parameters: list[_Parameter], arguments: list[str]) -> dict[str, Any]:
    options = {name: each for each in parameters for name in each.names}
    places = [each for each in parameters if each.is_argument]
    given: dict[str, Any] = {}
    rest = iter(arguments)
    for word in rest:
        if word == "--":
            for value in rest:
                _place(places, value, given)
        elif word.startswith("-") and word != "-":
            name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
            if name not in options or (equals and options[name].is_switch):
                raise _NotPlain
            _give(options[name], value if equals else _next(options[name], rest), given)
        else:
            _place(places, word, given)
    return _complete(parameters, given)


def _next(option: _Parameter, rest: Any) -> str:
    if option.is_switch:
        return ""
    value = next(rest, None)
    if value is None or value.startswith("-"):
        raise _NotPlain
    return value


def _place(places: list[_Parameter], value: str, given: dict[str, Any]) -> None:
    free = next((each for each in places if each.name not in given), None)
    if free is None:
        raise _NotPlain
    _give(free, value, given)


def _give(parameter: _Parameter, text: str, given: dict[str, Any]) -> None:
    if parameter.repeats:
        given.setdefault(parameter.name, []).append(parameter.parse(text))
    elif parameter.name in given:
        raise _NotPlain
    else:
        given[parameter.name] = True if parameter.is_switch else parameter.parse(text)


def _complete(parameters: list[_Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """All values, defaults included; callbacks are called once everything is known to be plain."""
    if any(each.default is inspect.Parameter.empty and each.name not in given for each in parameters):
        raise _NotPlain
    values = {each.name: given.get(each.name, each.default) for each in parameters}
    for each in parameters:
        if each.callback is not None:
            values[each.name] = each.callback(values[each.name])
    return values
