"""A GBNF grammar as a Lark grammar for llguidance, with exactly the same texts.

llguidance cuts a text into lexemes, and a lexeme takes all the characters it can. In GBNF nothing does: with

    root ::= name "s"
    name ::= [a-z]+

`cats` is a text, but a lexeme `[a-z]+` would take the `s` as well. So parts without recursion become lexemes, which are
fast to follow, only while that changes nothing: no character that may follow a lexeme may continue it, or another one
that is possible at the same place. A lexeme that could is split into its parts, at last into single characters.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import field

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.program.constraints.gbnf import Alt, Chars, Node, Ref, Repeat, Seq, read_gbnf, references
from headway.program.constraints.gbnf_lexemes import Ranges, too_long
from headway.program.constraints.grammar import LARK_NAMES

LEXEME_SIZE = 2000  # parts of a lexeme, each repeated one counted once
LEXEME_DEPTH = 100
ROUNDS = 200
SECONDS = 2.0  # of CPU time for all of it


def lark_of_gbnf(text: str) -> str:
    """The Lark grammar of a GBNF grammar."""
    deadline = time.thread_time() + SECONDS
    rules = read_gbnf(text)
    writer = _Writer(rules, _regular(rules))
    for _ in range(ROUNDS):
        grammar = writer.write()
        _check_size(grammar)
        long = too_long(grammar.rules, grammar.lexemes, deadline)
        if not long:
            return grammar.text()
        writer.split |= long
    raise InvalidInput("the GBNF grammar is too ambiguous to be split into lexemes; simplify it")


def _check_size(grammar: _Lark) -> None:
    """Raise before lexemes are compared, if the grammar is too large in any case: splitting lexemes adds to it."""
    names = len(grammar.rules) + len(grammar.lexemes)
    if names > LARK_NAMES:
        raise InvalidInput(f"the GBNF grammar makes {names} rules and lexemes; at most {LARK_NAMES} are allowed")


def _regular(rules: dict[str, Node]) -> dict[str, Node]:
    """The rules without recursion, with their references replaced by what they stand for, if that is not too large."""
    small: dict[str, Node] = {}
    needed = {name: references(node) for name, node in rules.items()}
    changed = True
    while changed:
        changed = False
        for name, node in rules.items():
            if name not in small and needed[name] <= small.keys() and _is_small(node, small):
                small[name] = _replaced(node, small)
                changed = True
    return small


def _is_small(node: Node, regular: dict[str, Node]) -> bool:
    """Whether it can be a lexeme: not too long, and not too deep for functions that call themselves."""
    size, depth = _measure(node, regular)
    return size <= LEXEME_SIZE and depth <= LEXEME_DEPTH


def _measure(node: Node, regular: dict[str, Node]) -> tuple[int, int]:
    """How many nodes a node has with those of the rules it refers to, and how deep they are."""
    match node:
        case Ref(name):
            return _measure(regular[name], regular)
        case Seq(parts) | Alt(parts):
            size, depth = 1, 0
            for part in parts:
                size_of, depth_of = _measure(part, regular)
                size, depth = size + size_of, max(depth, depth_of)
                if size > LEXEME_SIZE:
                    break
            return size, depth + 1
        case Repeat(part):
            size, depth = _measure(part, regular)
            return size + 1, depth + 1
    return 1, 1


def _replaced(node: Node, regular: dict[str, Node]) -> Node:
    match node:
        case Ref(name):
            return regular[name]
        case Seq(parts):
            return Seq(tuple(_replaced(part, regular) for part in parts))
        case Alt(parts):
            return Alt(tuple(_replaced(part, regular) for part in parts))
        case Repeat(part, least, most):
            return Repeat(_replaced(part, regular), least, most)
    return node


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Lark:
    """A Lark grammar: its rules as nodes whose references name lexemes or rules, and the lexemes."""

    rules: dict[str, Node] = field(default_factory=dict)
    lexemes: dict[str, Node] = field(default_factory=dict)

    def text(self) -> str:
        lines = [f"{name}: {_lark(node)}" for name, node in self.rules.items()]
        lines += [f"{name}: /{_regex(node)}/" for name, node in self.lexemes.items()]
        return "\n".join(lines) + "\n"


@dataclass(eq=False)
class _Writer:
    """Writes the rules that `root` needs, with every part without recursion as a lexeme unless it is to be split."""

    given: dict[str, Node]
    regular: dict[str, Node]
    split: set[Node] = field(default_factory=set)

    def write(self) -> _Lark:
        self._out, self._lexemes = _Lark(), dict[Node, str]()
        self._names: dict[str, str] = {"root": "start"}
        waiting = ["root"]
        while waiting:
            name = waiting.pop()
            self._out.rules[self._names[name]] = node = self._rule(self.given[name])
            known = {self._names[each]: each for each in self._names}
            waiting += [known[each] for each in references(node) if each in known and each not in self._out.rules]
        self._out.lexemes = {name: node for node, name in self._lexemes.items()}
        return self._out

    def _rule(self, node: Node) -> Node:
        """The node with its longest parts without recursion as references to lexemes."""
        is_regular = self._is_regular(node)
        if is_regular and _is_small(node, self.regular):
            whole = _replaced(node, self.regular)
            if _is_empty(whole):
                return Seq(())
            if whole not in self.split:
                return Ref(self._lexemes.setdefault(whole, f"T{len(self._lexemes)}"))
        match node:
            case Ref(name):
                return Ref(self._names.setdefault(name, f"r{len(self._names)}"))
            case Seq(parts):
                return Seq(tuple(self._rule(part) for part in (parts if is_regular else self._runs(parts))))
            case Alt(parts):
                return Alt(tuple(self._rule(part) for part in parts))
            case Repeat(part, least, most):
                return Repeat(self._rule(part), least, most)
        raise AssertionError(node)

    def _is_regular(self, node: Node) -> bool:
        return references(node) <= self.regular.keys()

    def _runs(self, parts: Iterable[Node]) -> Iterator[Node]:
        """The parts of a sequence, those without recursion that follow each other as one."""
        run: list[Node] = []
        for part in parts:
            if self._is_regular(part):
                run.append(part)
                continue
            if run:
                yield run[0] if len(run) == 1 else Seq(tuple(run))
                run = []
            yield part
        if run:
            yield run[0] if len(run) == 1 else Seq(tuple(run))


def _is_empty(node: Node) -> bool:
    """Whether a part without references takes nothing but the empty text."""
    match node:
        case Seq(parts) | Alt(parts):
            return all(map(_is_empty, parts))
        case Repeat(part, _, most):
            return most == 0 or _is_empty(part)
    return False


def _lark(node: Node) -> str:
    match node:
        case Ref(name):
            return name
        case Seq(parts):
            return " ".join(_grouped(part) for part in parts) or '""'
        case Alt(parts):
            return " | ".join(map(_lark, parts))
        case Repeat(part, least, most):
            return _grouped(part) + _quantifier(least, most)
    raise AssertionError(node)


def _grouped(node: Node) -> str:
    return _lark(node) if isinstance(node, Ref) else f"({_lark(node)})"


def _regex(node: Node) -> str:
    match node:
        case Chars(ranges):
            return _char_class(ranges)
        case Seq(parts):
            return "".join(f"(?:{_regex(part)})" if isinstance(part, Alt) else _regex(part) for part in parts)
        case Alt(parts):
            return "|".join(map(_regex, parts))
        case Repeat(part, least, most):
            inner = _regex(part)
            return (inner if isinstance(part, Chars) else f"(?:{inner})") + _quantifier(least, most)
    raise AssertionError(node)


def _quantifier(least: int, most: int | None) -> str:
    if most is None and least < 2:
        return "+" if least else "*"
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least},{'' if most is None else most}}}" if most != least else f"{{{least}}}"


def _char_class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    written = []
    for start, end in ranges:
        first = 0xE000 if 0xD800 <= start <= 0xDFFF else start  # surrogates are not characters
        last = 0xD7FF if 0xD800 <= end <= 0xDFFF else end
        if first <= last:
            written.append(_char(first) if first == last else f"{_char(first)}-{_char(last)}")
    return f"[{''.join(written)}]"


def _char(code: int) -> str:
    one = chr(code)
    return one if one.isascii() and (one.isalnum() or one in " _\",:;<>=!@%'`") else f"\\x{{{code:X}}}"
