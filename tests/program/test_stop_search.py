"""The search for stop strings finds what a plain search of the whole text would, at a cost that their length has no
part in."""

from __future__ import annotations

import random

from headway.program.generation.stop_search import StopSearch
from support.counted_lines import lines_of


def plainly(pieces: list[str], stops: tuple[str, ...]) -> list[object]:
    """By searching the whole text after each piece: the characters to hold back, and the stop string that ends it."""
    text, held = "", []
    for piece in pieces:
        text += piece
        found = [(at, i) for i, stop in enumerate(stops) if (at := text.find(stop)) >= 0]
        if found:
            at, which = min(found)
            return [*held, (at, stops[which])]
        held.append(max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0))
    return held


def searched(pieces: list[str], stops: tuple[str, ...], rng: random.Random) -> list[object]:
    search, held = StopSearch(stops), []
    for piece in pieces:
        if rng.random() < 0.2:
            search.copy().push("abcab")  # a copy goes its own way
        found = search.push(piece)
        if found is not None:
            return [*held, found]
        held.append(search.longest)
    return held


def test_it_finds_what_a_plain_search_finds() -> None:
    rng = random.Random(7)
    for round in range(4000):
        letters = "ab" if round % 2 else "abc"
        stops = tuple("".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(rng.randint(0, 4)))
        pieces = ["".join(rng.choices(letters, k=rng.randint(0, 4))) for _ in range(rng.randint(1, 12))]
        assert searched(pieces, stops, rng) == plainly(pieces, stops), (stops, pieces)


def test_long_stops_that_nearly_match_cost_little() -> None:
    """Counted in lines of Python, so that a busy machine changes nothing."""
    stops = [*("a" * 1000 + chr(200 + i) for i in range(32)), *("ab" * 500 + chr(300 + i) for i in range(32))]
    search, worst = StopSearch(stops), 0
    for piece in ["aaaa"] * 200 + ["b"] + ["abab"] * 200 + ["b"] + ["aaaa"] * 200:
        with lines_of(StopSearch) as counted:
            assert search.push(piece) is None
        assert search.longest <= 1000
        worst = max(worst, counted.lines)
    assert 100 < worst < 64 * 4 * 40  # stops × characters × a few lines, not × their lengths
