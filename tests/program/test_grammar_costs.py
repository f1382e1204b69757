"""What grammars cost others: checking, compiling and following one holds nobody up, whatever its text."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.program.constraints import cache as cache_module
from headway.program.constraints.cache import GrammarCache, grammar_cache
from headway.program.constraints.constraint import GrammarMatcher, compile
from headway.program.constraints.json_schema import HINTS, checked_schema
from headway.testing import ScriptedRunner
from support.schemas import obj


@pytest.fixture(scope="module")
def words(smollm2_path: Path) -> Iterator[hw.Engine]:
    """A scripted model with SmolLM2's vocabulary: it draws evenly from what a mask allows, at no cost."""
    with hw.Engine(smollm2_path, runner=ScriptedRunner(49152, 16), pages=400, threads=1) as made:
        yield made


def matcher(engine: hw.Engine, grammar: hw.Grammar, **options: Any) -> GrammarMatcher:
    return compile(grammar, engine.tokenizer, engine.vocab_size, **options)


def seconds(work: Callable[[], Any], tries: int = 5) -> float:
    """The least of a few tries, of this thread alone: the machine may be busy, and others take time of it."""
    least = math.inf
    for _ in range(tries):
        began = time.thread_time()
        work()
        least = min(least, time.thread_time() - began)
    return least


@pytest.mark.parametrize("piece", ['"\\', '\\"', "\\/", "/a", 'a["'], ids=["quote", "escape", "slash", "regex", "["])
def test_a_lark_grammar_is_read_in_one_go_however_it_is_broken(piece: str) -> None:
    grammar = 'start: "' + piece * (60_000 // len(piece))
    assert seconds(lambda: hw.Grammar.lark(grammar)) < 1


def test_a_long_oneof_is_read_at_once() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(900)} | {"d900": {"type": "string"}}
    choices = [obj({"k": {"const": str(i)}}) for i in range(600)]
    assert seconds(lambda: checked_schema({"oneOf": choices})) < 0.25
    assert seconds(lambda: checked_schema({"$defs": chain, "oneOf": [{"$ref": "#/$defs/d0"}] * 900})) < 0.25
    assert '"anyOf"' in checked_schema({"oneOf": choices})  # its choices cannot overlap
    assert '"oneOf"' in checked_schema({"oneOf": [*choices, choices[7]]})


def test_names_that_no_draft_knows_are_few_or_begin_with_x() -> None:
    own = {f"{i:x>12}": 1 for i in range(HINTS + 1)}
    with pytest.raises(hw.InvalidInput, match=f"more than {HINTS} different keywords .* begin .* with x-"):
        checked_schema(own)
    checked_schema({f"x-{name}": 1 for name in own})
    checked_schema({"type": "object", "properties": {name: dict.fromkeys(list(own)[:90], 1) for name in own}})


def test_a_long_forced_text_comes_in_pieces_as_the_tokenizer_would_write_it(words: hw.Engine) -> None:
    rng = random.Random(5)
    text = " ".join("".join(rng.choices("abcdefgäöü", k=rng.randint(2, 9))) for _ in range(8000))
    followed, written = matcher(words, hw.Grammar.choices([text])), []
    while not followed.finished:
        forced = followed.forced()
        assert 0 < len(forced) < 1000  # so many at a time, whatever is left of the text
        for token in forced:
            followed.accept(token)
        written += forced
    assert written == words.tokenizer.encode(text)


@pytest.mark.parametrize("filler", ["a", " ", "é", "ab "], ids=["letters", "spaces", "accents", "words"])
def test_a_forced_run_of_one_character_has_its_text(words: hw.Engine, filler: str) -> None:
    text = "x" + filler * 3000 + "y"
    followed, written = matcher(words, hw.Grammar.choices([text])), []
    while not followed.finished:
        forced = followed.forced() or [int(token) for token in words.tokenizer.encode(text)[len(written) :][:1]]
        for token in forced:
            followed.accept(token)
        written += forced
    assert words.tokenizer.decode(written) == text


PAIRS = " | ".join(f"{first} {second}" for first in "abcd" for second in "abcd")
COSTLY = {
    "pairs": hw.Grammar.lark("start: a\n" + "\n".join(f"{name}: {PAIRS} | /[a-z]/" for name in "abcd")),
    "ambiguous": hw.Grammar.lark('start: s\ns: s s s | s s | "a" | "b"'),
    "choices": hw.Grammar.lark(
        "start: "
        + " | ".join(f"r{i}" for i in range(500))
        + "\n"
        + "\n".join(f'r{i}: /[a-z]{{{1 + i % 9}}}/ start | "b{i}"' for i in range(500))
    ),
    "empty": hw.Grammar.lark('start: a*\na: b*\nb: c*\nc: d*\nd: "x"? | " "? | a'),
}


def longest_call(engine: hw.Engine, grammar: hw.Grammar) -> float:
    """Seconds of the longest of 40 masks and tokens, the grammar compiled anew."""
    compiled, worst = grammar_cache(engine.tokenizer, engine.vocab_size).compile(grammar), 0.0
    buffer = np.empty(engine.vocab_size // 32 + 2, np.uint32)
    for _ in range(40):
        mask = lambda: compiled.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)  # noqa: E731
        worst = max(worst, seconds(mask, tries=1))
        allowed = np.flatnonzero(np.unpackbits(buffer.view(np.uint8), bitorder="little")[: engine.vocab_size])
        if compiled.is_error() or not len(allowed):
            break
        token = int(allowed[-1])
        worst = max(worst, seconds(lambda token=token: compiled.consume_token(token), tries=1))
    return worst


@pytest.mark.parametrize("grammar", COSTLY.values(), ids=COSTLY.keys())
def test_a_single_call_of_a_costly_grammar_is_short(words: hw.Engine, grammar: hw.Grammar) -> None:
    assert any(longest_call(words, grammar) < 0.04 for _ in range(5))  # some 15 ms on a quiet machine


def test_what_was_refused_is_not_compiled_again_at_once(words: hw.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hw.GrammarTooSlow, match="less ambiguous") as first:
        matcher(words, COSTLY["pairs"])
    monkeypatch.setattr(GrammarCache, "compile", lambda *_: pytest.fail("compiled again"))
    with pytest.raises(hw.GrammarTooSlow) as second:
        matcher(words, COSTLY["pairs"])
    assert str(second.value) == str(first.value)
    monkeypatch.undo()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e9)  # there alone: event loops have the same clock
    monkeypatch.setattr(cache_module, "time", later)
    with pytest.raises(hw.GrammarTooSlow):
        matcher(words, COSTLY["pairs"])


@pytest.mark.parametrize("pattern", ["(?s).{20,900}", "[0-9]{20,900}"], ids=["dense", "sparse"])
def test_a_grammar_is_compiled_again_in_the_thread_for_slow_ones(
    words: hw.Engine, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no step waits for it; the tokens are the same."""
    grammar = hw.Grammar.regex(pattern)

    async def drawn(engine: hw.Engine) -> list[tuple[int, ...]]:
        async with engine.context().fill("A text:") as context:
            made = context.generate(hw.Multinomial(seed=3), max_tokens=60, constrain=grammar)
            return [step.tokens async for step in made]

    expected = words.run(drawn)
    where, compiled, breaks = [], GrammarCache.compile, iter([7, 23])
    broken = next(breaks)

    def compile_noted(*given: Any) -> Any:
        where.append(threading.current_thread().name)
        return compiled(*given)

    def breaking(self: GrammarMatcher, token: int) -> None:
        """At two places the table of states is full."""
        nonlocal broken
        moved(self, token)
        if len(self._accepted) == broken:
            broken = next(breaks, -1)
            self._matcher.consume_token(words.vocab_size - 1 if token else 0)
            self._matcher.consume_token(0)
            assert self._matcher.is_error()

    moved = GrammarMatcher._moved
    monkeypatch.setattr(GrammarCache, "compile", compile_noted)
    monkeypatch.setattr(GrammarMatcher, "_moved", breaking)
    assert words.run(drawn) == expected
    assert where == ["headway-slow-grammars_0"] * 2
