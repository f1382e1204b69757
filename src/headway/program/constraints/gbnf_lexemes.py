"""Which lexemes of a translated GBNF grammar would take characters that belong to what follows.

Each lexeme is an automaton whose states are its characters. Where a question would take too long the answer is yes,
which costs time when texts are followed and never changes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from headway.base.dataclass import dataclass
from headway.base.errors import GrammarTooSlow
from headway.program.constraints.gbnf import Alt, Chars, Node, Ref, Repeat, Seq

STEPS = 200_000  # of comparing lexemes with each other

Ranges = tuple[tuple[int, int], ...]
Rules = dict[str, Node]


def too_long(rules: Rules, lexemes: dict[str, Node], deadline: float) -> set[Node]:
    """The lexemes, which rules refer to by name, that could take characters which belong to what follows."""
    machines = {name: _automaton(node) for name, node in lexemes.items()}
    first, follow = _neighbors(rules, machines, deadline)
    together = _together(first, follow, machines)
    steps, nodes = STEPS, set[Node]()
    for name, machine in machines.items():
        _check_time(deadline)
        after: Ranges = tuple(
            sorted({each for next in follow[name] for i in machines[next].first for each in machines[next].chars[i]})
        )
        for other in together[name]:
            node = lexemes[other]
            if isinstance(node, Chars) or node in nodes or not after:
                continue
            steps, takes = _takes(machine, machines[other], after, steps)
            if takes:
                nodes.add(node)
    return nodes


def _check_time(deadline: float) -> None:
    """Raise if the thread has computed for too long."""
    if time.thread_time() > deadline:
        raise GrammarTooSlow("the GBNF grammar takes too long to be split into lexemes; simplify it")


@dataclass(frozen=True)
class _Automaton:
    """A lexeme's texts, or more: its characters are states, counts of repetitions are forgotten."""

    chars: tuple[Ranges, ...]
    first: frozenset[int]
    last: frozenset[int]
    follow: tuple[frozenset[int], ...]
    nullable: bool


def _together(first: set[str], follow: dict[str, set[str]], machines: dict[str, _Automaton]) -> dict[str, set[str]]:
    """For each lexeme those that may be possible at the same place; all of them, if finding out takes too long.

    At a place are the lexemes that may follow the one before, and if that text can be read as another one as well that
    is possible there, also those that may follow the other.
    """
    together: dict[str, set[str]] = {name: set() for name in machines}
    waiting = [(name, other) for name in first for other in first]
    steps = STEPS
    while waiting:
        one, other = waiting.pop()
        steps -= 1
        if other in together[one]:
            continue
        together[one].add(other)
        together[other].add(one)
        steps, same = _have_same(machines[one], machines[other], steps)
        if same:
            steps -= len(follow[one]) * len(follow[other])
            waiting += [(a, b) for a in follow[one] for b in follow[other] if b not in together[a]]
        if steps < 0:
            return {name: set(machines) for name in machines}
    return together


def _have_same(one: _Automaton, other: _Automaton, steps: int) -> tuple[int, bool]:
    """Whether a text is one of both; yes, when the steps run out."""
    if one is other:
        return steps, True
    return _read_together(one, other, steps, lambda i, j: i in one.last and j in other.last)


def _takes(one: _Automaton, other: _Automaton, after: Ranges, steps: int) -> tuple[int, bool]:
    """Whether a text of `one` and a character of `after` begin a text of `other`; yes, when the steps run out."""

    def goes_on(i: int, j: int) -> bool:
        return i in one.last and any(_meet(other.chars[k], after) for k in other.follow[j])

    steps, takes = _read_together(one, other, steps, goes_on)
    return max(0, steps), takes


def _read_together(
    one: _Automaton, other: _Automaton, steps: int, matches: Callable[[int, int], bool]
) -> tuple[int, bool]:
    """Whether a text that both may begin with leads to states like that. The steps that are left; yes, below 0."""
    waiting = [(i, j) for i in one.first for j in other.first if _meet(one.chars[i], other.chars[j])]
    seen = set(waiting)
    while waiting:
        i, j = waiting.pop()
        steps -= 1 + len(one.follow[i]) * len(other.follow[j])
        if steps < 0 or matches(i, j):
            return steps, True
        for pair in ((a, b) for a in one.follow[i] for b in other.follow[j]):
            if pair not in seen and _meet(one.chars[pair[0]], other.chars[pair[1]]):
                seen.add(pair)
                waiting.append(pair)
    return steps, False


def _meet(one: Ranges, other: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in one for c, d in other)


Place = TypeVar("Place", int, str)  # a character of a lexeme, or a lexeme
Ends = tuple[set[Place], set[Place], bool]  # what may be first, what may be last, whether there may be nothing


def _ends_of(node: Node, leaf: Callable[[Node], Ends[Place]], follow: Mapping[Place, set[Place]] | None) -> Ends[Place]:
    """The ends of a node, from those of its leaves; what may come after what goes into `follow`."""

    def link(before: set[Place], after: set[Place]) -> None:
        if follow is not None:
            for each in before:
                follow[each].update(after)

    def read(node: Node) -> Ends[Place]:
        match node:
            case Alt(parts):
                ends = [read(part) for part in parts]
                firsts = set[Place]().union(*(each[0] for each in ends))
                lasts = set[Place]().union(*(each[1] for each in ends))
                return firsts, lasts, any(each[2] for each in ends)
            case Seq(parts):
                first, last, empty = set[Place](), set[Place](), True
                for part in parts:
                    first_of, last_of, empty_of = read(part)
                    link(last, first_of)
                    first = first | first_of if empty else first
                    last = last | last_of if empty_of else last_of
                    empty = empty and empty_of
                return first, last, empty
            case Repeat(part, least, most):
                first, last, empty = read(part)
                if most != 1:
                    link(last, first)
                return first, last, empty or least == 0
        return leaf(node)

    return read(node)


def _automaton(node: Node) -> _Automaton:
    chars: list[Ranges] = []
    follow: dict[int, set[int]] = {}

    def leaf(node: Node) -> Ends[int]:
        assert isinstance(node, Chars)
        at = len(chars)
        chars.append(node.ranges)
        follow[at] = set()
        return {at}, {at}, False

    first, last, nullable = _ends_of(node, leaf, follow)
    after = tuple(frozenset(follow[i]) for i in range(len(chars)))
    return _Automaton(tuple(chars), frozenset(first), frozenset(last), after, nullable)


def _neighbors(rules: Rules, machines: dict[str, _Automaton], deadline: float) -> tuple[set[str], dict[str, set[str]]]:
    """The lexemes that a text may begin with, and for each lexeme those that may follow it."""
    known: dict[str, Ends[str]] = {name: (set(), set(), False) for name in rules}

    def leaf(node: Node) -> Ends[str]:
        assert isinstance(node, Ref)
        name = node.name
        return ({name}, {name}, machines[name].nullable) if name in machines else known[name]

    changed = True
    while changed:  # rules refer to each other, and to themselves
        changed = False
        for name, node in rules.items():
            _check_time(deadline)
            ends = _ends_of(node, leaf, None)
            if ends != known[name]:
                known[name], changed = ends, True
    follow: dict[str, set[str]] = {name: set() for name in machines}
    for node in rules.values():
        _check_time(deadline)
        _ends_of(node, leaf, follow)
    return known["start"][0], follow
