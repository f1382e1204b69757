"""Incremental JSON: where a value ends, and the tool call in it.

Scanners do not raise. They stop at the first invalid character, which does not depend on how the text was split, and
set `why`.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from headway.text.replies.parts import ParseLimits

SPACE = " \t\n\r"
MAX_DIGITS = 1000
_SPACES = re.compile(r"[ \t\n\r]+")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_WHOLE_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}


class JsonScanner:
    """Finds the end of one JSON value."""

    def __init__(self, depth: int) -> None:
        self.done = False
        self.why: str | None = None
        self._depth = depth
        self._stack: list[str] = []
        self._expect = "value"  # or: first value, key, first key, colon, comma
        self._key = False  # the open string is a key
        self._string = False
        self._escape = 0  # -1: the letter of an escape comes next; n > 0: n hex digits of \u are missing
        self._scalar = ""

    def feed(self, text: str, at: int, end: int) -> int:
        """Read text[at:end] up to the end of the value; return where it stopped."""
        while at < end and not self.done and self.why is None:
            if self._string:
                at = self._in_string(text, at, end)
            elif self._scalar:
                at = self._in_scalar(text, at, end)
            else:
                at = self._outside(text, at, end)
        return at

    def _in_string(self, text: str, at: int, end: int) -> int:
        char = text[at]
        if self._escape:
            return self._in_escape(char, at)
        if (run := _match_end(_IN_STRING, text, at, end)) > at:
            return run
        if char == '"':
            self._string = False
            self._close_string()
        elif char == "\\":
            self._escape = -1
        else:
            return self._stop(f"a string holds the control character {char!r}, which JSON writes as an escape", at)
        return at + 1

    def _in_escape(self, char: str, at: int) -> int:
        if self._escape > 0 and char in "0123456789abcdefABCDEF":
            self._escape -= 1
        elif self._escape == -1 and char in '"\\/bfnrtu':
            self._escape = 4 if char == "u" else 0
        else:
            return self._stop(f"a string holds a wrong escape, at {char!r}", at)
        return at + 1

    def _close_string(self) -> None:
        if self._key:
            self._key, self._expect = False, "colon"
        else:
            self._close_value()

    def _in_scalar(self, text: str, at: int, end: int) -> int:
        if (run := _match_end(_SCALAR, text, at, end)) > at:
            self._scalar += text[at:run]
            return run
        if not _WHOLE_SCALAR.fullmatch(self._scalar):
            return self._stop(f"{self._scalar[:40]!r} is not a JSON value", at)
        self._scalar = ""
        self._close_value()
        return at

    def _close_value(self) -> None:
        self.done = not self._stack
        self._expect = "comma"

    def _outside(self, text: str, at: int, end: int) -> int:
        char = text[at]
        if char in SPACE:
            return _match_end(_SPACES, text, at, end)
        taken = self._structure(char) if char in "{}[],:" else self._opened(char)
        if taken:
            return at + 1
        return self._stop(self.why or f"{char!r} is where a {_wanted(self._expect)} should be", at)

    def _opened(self, char: str) -> bool:
        """Start a string or scalar if one may begin here; whether it does."""
        key, value = self._expect in ("key", "first key"), self._expect in ("value", "first value")
        if char == '"' and (key or value):
            self._string, self._key = True, key
            return True
        if value and _SCALAR.match(char):
            self._scalar = char
            return True
        return False

    def _structure(self, char: str) -> bool:
        inside = self._stack[-1] if self._stack else ""
        if char in "{[" and self._expect in ("value", "first value"):
            return self._push(char)
        if char == "}" and inside == "{" and self._expect in ("first key", "comma"):
            return self._pop()
        if char == "]" and inside == "[" and self._expect in ("first value", "comma"):
            return self._pop()
        if char == "," and self._expect == "comma":
            self._expect = "key" if inside == "{" else "value"
            return True
        if char == ":" and self._expect == "colon":
            self._expect = "value"
            return True
        return False

    def _push(self, char: str) -> bool:
        if len(self._stack) == self._depth:
            self.why = f"it is nested deeper than {self._depth} levels"
            return False
        self._stack.append(char)
        self._expect = "first key" if char == "{" else "first value"
        return True

    def _pop(self) -> bool:
        self._stack.pop()
        self._close_value()
        return True

    def _stop(self, why: str, at: int) -> int:
        self.why = why
        return at


class CallScanner:
    """Reads one call: `{"name": …, "arguments": {…}}` with keys in any order, or only the arguments of a `name`.

    `parameters` is a synonym of `arguments`; `id` and `"type": "function"` are optional. With `texts=True` the
    arguments may also be a string of JSON text.
    """

    def __init__(self, limits: ParseLimits, name: str | None = None, *, texts: bool = True) -> None:
        self.name = name
        self.id: str | None = None
        self.done = False
        self.why: str | None = None
        self.begun = False  # the arguments have certainly begun
        self._limits, self._texts = limits, texts
        self._room = limits.call_chars
        self._only_arguments = name is not None
        self._expect = "value" if name is not None else "open"  # or: first key, key, colon, comma
        self._key = "arguments" if name is not None else ""
        self._keys: set[str] = set()
        self._value: JsonScanner | None = None
        self._raw: list[str] = []  # of the key or value being read
        self._arguments: list[str] = []
        self._given = 0

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` up to the end of the call; return where it stopped."""
        start, end = at, min(len(text), at + self._room)
        while at < end and not self.done and self.why is None:
            at = self._outer(text, at) if self._value is None else self._inner(self._value, text, at, end)
        self._room -= at - start
        if at == end < len(text) and not self.done and self.why is None:
            self.why = f"the call is longer than {self._limits.call_chars:,} characters"
        return at

    def take(self) -> str:
        """The text of the arguments since the last call of this method."""
        new = "".join(self._arguments[self._given :])
        self._given = len(self._arguments)
        return new

    def read(self) -> dict[str, Any]:
        """The arguments of a complete call; ValueError with a sentence if they are invalid."""
        if self.name is None:
            raise ValueError("the call has no name")
        if not self._arguments:
            raise ValueError(f"the call of {self.name!r} has no arguments; it must have an object, {{}} for none")
        return read_object("".join(self._arguments), self._limits.depth)

    def _outer(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACE:
            return at + 1
        match self._expect, char:
            case "open", "{":
                self._expect = "first key"
            case (("first key" | "key"), '"'):
                self._read_next(key="")
                return at
            case "colon", ":":
                self._expect = "value"
            case "comma", ",":
                self._expect = "key"
            case (("first key" | "comma"), "}"):
                self.done = True
            case "value", _:
                return self._open_value(char, at)
            case _:
                self.why = f"{char!r} is where a {_wanted(self._expect)} should be"
                return at
        return at + 1

    def _open_value(self, char: str, at: int) -> int:
        wanted = {"arguments": '{"' if self._texts else "{"}.get(self._key, '"')
        if char not in wanted:
            kind = "an object" if self._key == "arguments" else "a string"
            self.why = f"{self._key} begins with {char!r}; it must be {kind}"
            return at
        self.begun = self.begun or self._key == "arguments"
        self._read_next(key=self._key)
        return at

    def _read_next(self, key: str) -> None:
        self._key, self._raw = key, []
        self._value = JsonScanner(self._limits.depth)

    def _inner(self, value: JsonScanner, text: str, at: int, end: int) -> int:
        new = value.feed(text, at, end)
        self._raw.append(text[at:new])
        if self._key == "arguments" and self._raw[0][:1] == "{":
            self._arguments.append(text[at:new])
        if value.why is not None:
            self.why = value.why
        elif value.done:
            self._value = None
            self._close(self._key)
        return new

    def _close(self, key: str) -> None:
        self.done = self._only_arguments
        self._expect = "comma"
        match key:
            case "":
                self._close_key(json.loads("".join(self._raw)))
            case "name" | "id":
                self._close_name(key, json.loads("".join(self._raw)))
            case "type":
                if (kind := json.loads("".join(self._raw))) != "function":
                    self.why = f"the call has the type {kind[:40]!r}; it must be 'function'"
            case "arguments":
                if not self._arguments:  # a string of JSON text
                    self._arguments.append(json.loads("".join(self._raw)))

    def _close_name(self, key: str, name: str) -> None:
        self.why = wrong_name(name, self._limits, key)
        if self.why is None:
            setattr(self, key, name)

    def _close_key(self, key: str) -> None:
        known = _KEYS.get(key)
        if known is None:
            self.why = f"the call has the key {key[:40]!r}; it must have name and arguments"
        elif known in self._keys:
            self.why = f"the call has {known} twice"
        else:
            self._keys.add(known)
            self._key, self._expect = known, "colon"


def read_object(text: str, depth: int) -> dict[str, Any]:
    """The object in `text`; ValueError with a sentence if it is invalid."""
    scanner = JsonScanner(depth)
    stop = scanner.feed(text, 0, len(text))
    if scanner.why is not None or not scanner.done or text[stop:].strip(SPACE):
        raise ValueError(scanner.why or "the arguments are not one JSON object")
    value = json.loads(text, object_pairs_hook=_without_repeats, parse_float=_finite, parse_int=_integer)
    if not isinstance(value, dict):
        raise ValueError(f"the arguments are a JSON {type(value).__name__}; they must be an object")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half a surrogate pair, which is not a character") from None
    return value


def wrong_name(name: str, limits: ParseLimits, what: str = "name") -> str | None:
    """Why `name` is not a valid name; None if it is."""
    if name and name.isprintable() and len(name) <= limits.name_chars:
        return None
    return f"the call has the {what} {name[:40]!r}; it must be 1 to {limits.name_chars} printable characters"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:40]!r} appears twice in one object")
    return value


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(text):,} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _match_end(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    match = pattern.match(text, at, end)
    return at if match is None else match.end()


def _wanted(expect: str) -> str:
    names = {"comma": "comma or a closing bracket", "open": "{", "first key": "key in quotes", "first value": "value"}
    return names.get(expect, "key in quotes" if expect == "key" else expect)
