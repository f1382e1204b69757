"""JSON text to values, piece by piece.

The parser of `json` is one call that holds the GIL until it returns: for megabytes of short values that is long enough
for everybody else to notice. `loads` gives what `json.loads` gives, in calls of a millisecond, so that other threads
run in between. A text of a stranger is also bounded in how many values it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from headway.base.errors import InvalidInput

PIECE = 64 << 10  # characters that are parsed in one call
ESCAPE = 6  # characters of the longest escape, which is not cut
MAX_NUMBERS = 1 << 20
MAX_VALUES = 1 << 17  # other than the numbers of lists
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'"[^"\\\x00-\x1f]*"')  # a text without escapes
_WHOLE = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')  # any text
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt]))*')  # of a text, in whole escapes
_SCALARS = re.compile(r'[^"\[\]{}]*,')  # values of a list that are neither texts nor containers, up to a comma


class Budget:
    """How many values texts may have, together if they share it."""

    def __init__(self) -> None:
        self._numbers, self._values = MAX_NUMBERS, MAX_VALUES

    def take(self, *, numbers: int = 0, values: int = 0) -> None:
        """Count values; raises `TooManyValues`."""
        self._numbers -= numbers
        self._values -= values
        if self._numbers < 0:
            raise TooManyValues(f"more than {MAX_NUMBERS} numbers; send fewer")
        if self._values < 0:
            raise TooManyValues(f"more than {MAX_VALUES} lists, objects and texts; send fewer")


class TooManyValues(InvalidInput):
    """A text has more values than are allowed; `where` is the outermost member that has the last of them."""

    where: str = ""


def loads(
    text: str,
    *,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
    bounded: bool = False,
    budget: Budget | None = None,
    piece: int = PIECE,
) -> Any:
    """The value of a JSON text, as `json.loads` gives it, with the same errors; a long one is parsed in pieces.

    One that is `bounded` and has more than MAX_NUMBERS or MAX_VALUES raises `TooManyValues`; so does one that has more
    than is left of a `budget`.
    """
    if len(text) <= piece and budget is None:
        return json.loads(text, object_hook=object_hook, parse_constant=parse_constant)
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
    decoder = json.JSONDecoder(object_hook=object_hook, parse_constant=parse_constant)
    reader = _JsonReader(text, decoder, Budget() if bounded and budget is None else budget, piece)
    value, end = reader.value(reader.after_space(0))
    if (end := reader.after_space(end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def written_size(value: Any) -> int:
    """The bytes of a JSON value as `json.dumps(value, ensure_ascii=False)` writes it."""
    size, rest = 0, [value]
    while rest:
        match one := rest.pop():
            case str():
                size += sum(_written_size(one[at : at + PIECE]) - 2 for at in range(0, len(one), PIECE)) + 2
            case dict():
                size += 2 * max(1, 2 * len(one))  # {}, and ": " and ", " for each member but the last
                rest += [*one.keys(), *one.values()]
            case list() | tuple():
                size += 2 * max(1, len(one))
                rest += one
            case _:
                size += _written_size(one)
    return size


def _written_size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def write(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    """As `json.dumps(value, ensure_ascii=False)`, in short calls."""
    return "".join(json.JSONEncoder(ensure_ascii=False, separators=separators).iterencode(value))


class _JsonReader:
    """One text that is being parsed. Its methods take the place where something begins, and return where it ends."""

    def __init__(self, text: str, decoder: json.JSONDecoder, budget: Budget | None, piece: int) -> None:
        self._text, self._decoder, self._budget, self._piece = text, decoder, budget, max(piece, ESCAPE)
        self._scan = decoder.scan_once  # pyright: ignore[reportAttributeAccessIssue]  # one value, as `json` parses it

    def after_space(self, place: int) -> int:
        while (match := _SPACE.match(self._text, place, place + self._piece)) and match.end() > place:
            place = match.end()
        return place

    def value(self, place: int) -> tuple[Any, int]:
        if self._budget is not None:
            self._budget.take(values=1)
        match self._text[place : place + 1]:
            case "[":
                return self._list(place + 1)
            case "{":
                return self._object(place + 1)
            case '"':
                return self._string(place)
        try:
            return self._scan(self._text, place)
        except StopIteration as error:
            raise self._error("Expecting value", error.value) from None

    def _string(self, place: int) -> tuple[str, int]:
        """A text; a long one is made of pieces."""
        if match := _PLAIN.match(self._text, place, place + self._piece):
            return self._text[place + 1 : match.end() - 1], match.end()
        if _WHOLE.match(self._text, place, place + self._piece):
            return self._scan(self._text, place)
        parts: list[str] = []
        end = place + 1
        while match := _INSIDE.match(self._text, end, end + self._piece):
            if match.end() == end:
                break
            part = scanstring(f'{match[0]}"', 0)[0]
            if self._text.startswith("\\u", end) and parts and _is_pair(parts[-1][-1:], part[:1]):
                pair = (parts[-1][-1:] + part[:1]).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
                parts[-1], part = parts[-1][:-1], pair + part[1:]
            parts.append(part)
            end = match.end()
        if self._text[end : end + 1] == '"':
            return "".join(parts), end + 1
        try:
            scanstring(self._text, end)
        except json.JSONDecodeError as error:
            raise self._error(error.msg, place if error.msg.startswith("Unterminated") else error.pos) from None
        raise AssertionError("what cannot be cut is an error")

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
            if self._budget is not None:
                self._budget.take(numbers=len(values))
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
            name, place = self._string(place)
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


def _is_pair(high: str, low: str) -> bool:
    """Whether these are the halves of one character, each from an escape of its own."""
    return "\ud800" <= high <= "\udbff" and "\udc00" <= low <= "\udfff"
