"""JSON text to values, piece by piece.

The parser of `json` is one call that holds the GIL until it returns: for megabytes of short values that is long enough
for everybody else to notice. `loads` gives what `json.loads` gives, in calls of a millisecond, so that other threads
run in between. A text of a stranger is also bounded in how many values it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from headway.base.errors import InvalidInput

PIECE = 64 << 10  # characters that are parsed in one call
MAX_NUMBERS = 1 << 20
MAX_VALUES = 1 << 17  # other than the numbers of lists
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALARS = re.compile(r'[^"\[\]{}]*,')  # values of a list that are neither texts nor containers, up to a comma


class TooManyValues(InvalidInput):
    """A text has more values than are allowed; `where` is the outermost member that has the last of them."""

    where: str = ""


def loads(
    text: str,
    *,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
    bounded: bool = False,
    piece: int = PIECE,
) -> Any:
    """The value of a JSON text, as `json.loads` gives it, with the same errors; a long one is parsed in pieces.

    One that is `bounded` and has more than MAX_NUMBERS or MAX_VALUES raises `TooManyValues`.
    """
    if len(text) <= piece:
        return json.loads(text, object_hook=object_hook, parse_constant=parse_constant)
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
    reader = _JsonReader(text, json.JSONDecoder(object_hook=object_hook, parse_constant=parse_constant), bounded, piece)
    value, end = reader.value(reader.after_space(0))
    if (end := reader.after_space(end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _JsonReader:
    """One text that is being parsed. Its methods take the place where something begins, and return where it ends."""

    def __init__(self, text: str, decoder: json.JSONDecoder, bounded: bool, piece: int) -> None:
        self._text, self._decoder, self._bounded, self._piece = text, decoder, bounded, piece
        self._scan = decoder.scan_once  # pyright: ignore[reportAttributeAccessIssue]  # one value, as `json` parses it
        self._numbers = self._values = 0

    def after_space(self, place: int) -> int:
        match = _SPACE.match(self._text, place)
        return place if match is None else match.end()

    def value(self, place: int) -> tuple[Any, int]:
        self._values += 1
        if self._bounded and self._values > MAX_VALUES:
            raise TooManyValues(f"more than {MAX_VALUES} lists, objects and texts; send fewer")
        match self._text[place : place + 1]:
            case "[":
                return self._list(place + 1)
            case "{":
                return self._object(place + 1)
        try:
            return self._scan(self._text, place)
        except StopIteration as error:
            raise self._error("Expecting value", error.value) from None

    def _list(self, place: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        place = self.after_space(place)
        if self._text[place : place + 1] == "]":
            return items, place + 1
        while True:
            place = self._scalars(place, items)
            value, place = self.value(self.after_space(place))
            items.append(value)
            place = self.after_space(place)
            match self._text[place : place + 1]:
                case ",":
                    place += 1
                case "]":
                    return items, place + 1
                case _:
                    raise self._error("Expecting ',' delimiter", place)

    def _scalars(self, place: int, items: list[Any]) -> int:
        """Add a run of numbers, and words such as null, each of them with a comma behind it."""
        while match := _SCALARS.match(self._text, place, place + self._piece):
            run = match[0][:-1]
            if not run.strip(" \t\n\r"):
                raise self._error("Expecting value", self.after_space(place))
            try:
                values = self._decoder.decode(f"[{run}]")
            except json.JSONDecodeError as error:
                raise self._error(error.msg, place + error.pos - 1) from None
            self._numbers += len(values)
            if self._bounded and self._numbers > MAX_NUMBERS:
                raise TooManyValues(f"more than {MAX_NUMBERS} numbers; send fewer")
            items += values
            place = match.end()
        return place

    def _object(self, place: int) -> tuple[Any, int]:
        members: dict[str, Any] = {}
        place = self.after_space(place)
        if self._text[place : place + 1] == "}":
            return self._hooked(members), place + 1
        while True:
            if self._text[place : place + 1] != '"':
                raise self._error("Expecting property name enclosed in double quotes", place)
            name, place = self._scan(self._text, place)
            place = self.after_space(place)
            if self._text[place : place + 1] != ":":
                raise self._error("Expecting ':' delimiter", place)
            try:
                members[name], place = self.value(self.after_space(place + 1))
            except TooManyValues as error:
                error.where = name  # of the outermost one in the end
                raise
            place = self.after_space(place)
            match self._text[place : place + 1]:
                case ",":
                    place = self.after_space(place + 1)
                case "}":
                    return self._hooked(members), place + 1
                case _:
                    raise self._error("Expecting ',' delimiter", place)

    def _hooked(self, members: dict[str, Any]) -> Any:
        hook = self._decoder.object_hook
        return members if hook is None else hook(members)

    def _error(self, message: str, place: int) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self._text, place)
