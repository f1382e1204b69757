"""Grammars in GBNF, llama.cpp's notation, read into rules. `constraints/gbnf_lark.py` writes them as Lark.

    root ::= item+
    item ::= "- " [^\\n]+ "\\n"   # a literal, a class, a group (…), a rule; each with *, +, ?, {2}, {2,} or {2,5}

A rule is made of frozen nodes. Literals are sequences of classes of one character, so that nothing is left but
characters, sequences, alternatives, repetitions and references. Token references (`<[1000]>`, `<think>`) are refused.
"""

from __future__ import annotations

import re
from functools import cached_property

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.text import short_repr

GBNF_BYTES = 64 * 1024
RULES = 512
DEPTH = 50  # of groups in groups
REPETITIONS = 2000  # as llama.cpp has it
LAST = 0x10FFFF

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*+")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*+")
_COUNTS = re.compile(r"\{[ \t\r\n]*(\d+)?[ \t\r\n]*(,)?[ \t\r\n]*(\d+)?[ \t\r\n]*\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class Chars:
    """One character of any of these ranges, sorted and apart from each other."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Seq:
    """All of these, one after the other; none of them: the empty text."""

    parts: tuple[Node, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(("seq", self.parts))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Alt:
    """One of these."""

    parts: tuple[Node, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(("alt", self.parts))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Repeat:
    """From `least` to `most` of this; None: without end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Ref:
    """What the rule of this name produces."""

    name: str


Node = Chars | Seq | Alt | Repeat | Ref


def read_gbnf(text: str) -> dict[str, Node]:
    """The rules of a grammar, of which `root` is one and every reference has its rule."""
    size = len(text.encode())
    if size > GBNF_BYTES:
        raise InvalidInput(f"the GBNF grammar has {size} bytes; at most {GBNF_BYTES} are allowed")
    rules = _GbnfReader(text).rules()
    if len(rules) > RULES:
        raise InvalidInput(f"the GBNF grammar has {len(rules)} rules; at most {RULES} are allowed")
    for name in ("root", *(name for rule in rules.values() for name in references(rule))):
        if name not in rules:
            raise InvalidInput(f"the GBNF grammar has no rule {name!r:.60}; define it as `{name:.60} ::= …`")
    return rules


def references(node: Node) -> set[str]:
    """The names of the rules that a node refers to."""
    match node:
        case Ref(name):
            return {name}
        case Seq(parts) | Alt(parts):
            return {name for part in parts for name in references(part)}
        case Repeat(part):
            return references(part)
    return set()


class _GbnfReader:
    """Reads rules from a text, from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            name = self._name("the name of a rule")
            self._skip()
            if not self._text.startswith("::=", self._at):
                raise self._error("`::=` after the name of a rule")
            self._at += 3
            self._skip(lines=True)
            if name in rules:
                raise InvalidInput(f"the GBNF grammar has the rule {name!r:.60} twice; rename one of them")
            rules[name] = self._alternatives(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("a literal, a class, a group, a rule, `|` or the end of the line")
            self._skip(lines=True)
        return rules

    def _alternatives(self, *, nested: bool) -> Node:
        parts = [self._sequence(nested=nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip(lines=True)
            parts.append(self._sequence(nested=nested))
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def _sequence(self, *, nested: bool) -> Node:
        parts: list[Node] = []
        while (part := self._part()) is not None:
            self._skip(lines=nested)
            parts.append(self._repeated(part, nested=nested))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _part(self) -> Node | None:
        match self._peek():
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case "(":
                return self._group()
            case ".":
                self._at += 1
                return Chars(((0, LAST),))
            case "<" | "!":
                raise self._error("text: references to tokens are not supported, so write what they stand for; or")
            case one if _NAME.match(one):
                return Ref(self._name("a rule"))
        return None

    def _group(self) -> Node:
        if self._depth == DEPTH:
            raise InvalidInput(f"the GBNF grammar has groups in groups deeper than {DEPTH}; name them as rules")
        self._at += 1
        self._depth += 1
        self._skip(lines=True)
        node = self._alternatives(nested=True)
        if self._peek() != ")":
            raise self._error("`)`")
        self._at += 1
        self._depth -= 1
        return node

    def _literal(self) -> Node:
        self._at += 1
        parts: list[Node] = []
        while self._peek() != '"':
            one = self._char('`"` at the end of a literal')
            parts.append(Chars(((one, one),)))
        self._at += 1
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _class(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            first = last = self._char("`]` at the end of a class")
            if self._peek() == "-" and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._char("the end of a range of characters")
            if first > last:
                raise InvalidInput(f"the GBNF grammar has the range {chr(first)!r} to {chr(last)!r}; turn it around")
            ranges.append((first, last))
        self._at += 1
        chars = _merged(_outside(_merged(ranges)) if negated else ranges)
        if not chars:
            raise InvalidInput("the GBNF grammar has a class that no character is in; remove it")
        return Chars(tuple(chars))

    def _char(self, wanted: str) -> int:
        """The next character of a literal or a class, as a number."""
        one = self._peek()
        if not one:
            raise self._error(wanted)
        self._at += 1
        if one != "\\":
            return ord(one)
        kind = self._peek()
        self._at += 1
        if kind in _HEX_ESCAPES:
            digits = self._text[self._at : self._at + _HEX_ESCAPES[kind]]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX_ESCAPES[kind]}}}", digits):
                raise self._error(f"{_HEX_ESCAPES[kind]} hexadecimal digits after \\{kind}")
            self._at += len(digits)
            if (code := int(digits, 16)) > LAST or 0xD800 <= code <= 0xDFFF:
                raise InvalidInput(f"the GBNF grammar has \\{kind}{digits}, which is not a character of Unicode")
            return code
        if kind not in _ESCAPES:
            escape = short_repr("\\" + kind)
            raise InvalidInput(
                f"the GBNF grammar has the escape {escape}; those known are \\n, \\r, \\t, \\\\, "
                '\\", \\[, \\], \\xXX, \\uXXXX and \\UXXXXXXXX'
            )
        return ord(_ESCAPES[kind])

    def _repeated(self, node: Node, *, nested: bool) -> Node:
        times = 0
        while (one := self._peek()) and one in "*+?{":
            times += 1
            if times > DEPTH:
                raise InvalidInput(f"the GBNF grammar repeats one thing in more than {DEPTH} ways; keep one of them")
            if one == "{":
                least, most = self._counts()
            else:
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[one]
                self._at += 1
            node = Repeat(node, least, most) if most != 0 else Seq(())
            self._skip(lines=nested)
        return node

    def _counts(self) -> tuple[int, int | None]:
        match = _COUNTS.match(self._text, self._at)
        if match is None or (match[1] is None and match[3] is None) or (match[2] is None and match[1] is None):
            raise self._error("{m}, {m,}, {m,n} or {,n}")
        self._at = match.end()
        digits = [each for each in (match[1], match[3]) if each is not None]
        if any(len(each) > 6 or int(each) > REPETITIONS for each in digits):
            raise InvalidInput(f"the GBNF grammar repeats {match[0]:.40} times; at most {REPETITIONS} are allowed")
        least = int(match[1] or 0)
        most = int(match[3]) if match[3] else (None if match[2] else least)
        if most is not None and most < least:
            raise InvalidInput(f"the GBNF grammar repeats {match[0]:.40} times; the second number must not be smaller")
        return least, most

    def _name(self, wanted: str) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._error(wanted)
        self._at = match.end()
        return match[0]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, *, lines: bool = False) -> None:
        match = (_SPACE_AND_LINES if lines else _SPACE).match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _error(self, wanted: str) -> InvalidInput:
        line = self._text.count("\n", 0, self._at) + 1
        here = short_repr(self._text[self._at : self._at + 20]) if self._peek() else "its end"
        return InvalidInput(f"line {line} of the GBNF grammar has {here} where {wanted} must be")


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same characters in ranges that are sorted and do not touch."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out


def _outside(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """All other characters."""
    ends = [-1, *(last for _, last in ranges)]
    starts = [*(first for first, _ in ranges), LAST + 1]
    return [(end + 1, start - 1) for end, start in zip(ends, starts, strict=True) if end + 1 < start]
