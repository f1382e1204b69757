"""Grammars that are slow to follow: others go on meanwhile, no token changes, and a limit ends them with the reason."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.program.constraints import batched_masks, budget, cache
from headway.program.constraints.async_mask import GrammarMask, compute
from headway.program.constraints.budget import GrammarBudget, ThreadClock, TokenTime
from headway.program.constraints.cache import GrammarCache
from headway.program.constraints.constraint import COMPILERS, GrammarMatcher, _compilers, compile, compile_async
from headway.server.api.token_bounds import BadWords, TokenBounds
from headway.server.chats.format_or_call import FormatOrCall
from headway.testing import ScriptedRunner
from support.schemas import array, obj

AMBIGUOUS = hw.Grammar.lark('start: s\ns: s s s | s s | "a" | "b"')
PAIRS = " | ".join(f"{first} {second}" for first in "abcd" for second in "abcd")
LONG_ROWS = hw.Grammar.lark("start: a\n" + "\n".join(f'{name}: {PAIRS} | "§"' for name in "abcd"))
EXPRESSIONS = hw.Grammar.lark(
    r"""
    start: statement+
    statement: NAME "=" e NL | "if" e ":" NL statement | "return" e NL | e NL
    e: e OP e | "(" e ")" | NAME | NUMBER | e "." NAME | e "(" [e ("," e)*] ")" | e "[" e "]" | "not" e | "-" e
    OP: "+" | "-" | "*" | "/" | "==" | "<" | ">" | "and" | "or"
    NAME: /[a-z_][a-z0-9_]*/
    NUMBER: /[0-9]+(\.[0-9]+)?/
    NL: /\n/
    %ignore " "
    """
)
PLAIN = hw.Grammar.regex("[a-z ]{50,400}")
OPEN = hw.Grammar.regex("(?s).{100,3000}")
LETTER = hw.Grammar.json_schema(obj({"to": {"enum": ["Ann", "Bob"]}, "body": {"type": "string", "minLength": 60}}))
NUMBERS = hw.Grammar.json_schema(array({"type": "integer", "minimum": 0, "maximum": 999}, 3, 20))


@pytest.fixture(scope="module")
def words(smollm2_path: Path) -> Iterator[hw.Engine]:
    """A scripted model with SmolLM2's vocabulary: it draws evenly from what a mask allows, at no cost."""
    with hw.Engine(smollm2_path, runner=ScriptedRunner(49152, 16), pages=400, threads=1) as made:
        yield made


@pytest.fixture
def always_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every grammar counts as slow."""
    monkeypatch.setattr(TokenTime, "is_slow", True)


def matcher(engine: hw.Engine, grammar: hw.Grammar, **options: Any) -> GrammarMatcher:
    return compile(grammar, engine.tokenizer, engine.vocab_size, **options)


def started(engine: hw.Engine, constrain: Any, seed: int = 1, **options: Any) -> hw.Generation:
    context = engine.context().fill(f"A text {seed}:")
    options = {"max_tokens": 60} | options
    return context.generate(hw.Multinomial(seed=seed), constrain=constrain, **options)


def test_others_go_on_while_a_slow_mask_is_computed(words: hw.Engine) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def long_work() -> None:
        busy.set()
        assert go_on.wait(60)

    async def program(engine: hw.Engine) -> None:
        slow = matcher(engine, AMBIGUOUS)
        slow.pace.suspect()
        blocked = budget._slow_thread().submit(long_work)  # somebody's mask that takes as long as it takes
        assert await asyncio.to_thread(busy.wait, 60)
        waiting = asyncio.create_task(anext(started(engine, slow)))
        assert len(await started(engine, None, max_tokens=100).tokens()) == 100
        assert await started(engine, PLAIN).tokens()
        assert not waiting.done()
        go_on.set()
        assert len((await waiting).tokens) == 1
        blocked.result()

    words.run(program)


async def ambiguous(engine: hw.Engine, seed: int) -> None:
    async with engine.context().fill(f"{seed}") as context:
        made = context.generate(hw.Multinomial(seed=seed), max_tokens=400, min_tokens=400, constrain=AMBIGUOUS)
        with pytest.raises(hw.GrammarTooSlow, match=r"Too many items \(limit \d+.*less ambiguous"):
            await made.tokens()
        with pytest.raises(hw.GrammarTooSlow, match="less ambiguous"):  # said again to whoever asks again
            await anext(made)


def test_ambiguous_grammars_end_with_the_reason_and_others_do_not(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        others = asyncio.gather(*(ambiguous(engine, seed) for seed in range(2)))
        while not others.done():
            assert len(await started(engine, None, max_tokens=2).tokens()) == 2
        await others

    words.run(program)
    assert words.stats().pages_held == 0


@pytest.mark.slow
def test_others_hardly_wait_for_ambiguous_grammars(words: hw.Engine) -> None:
    async def bystander(engine: hw.Engine, others: asyncio.Future[Any] | None = None) -> list[float]:
        """How long each of its texts took, alone twenty of them."""
        seconds: list[float] = []
        while len(seconds) < 20 if others is None else not others.done():
            began = time.perf_counter()
            assert len(await started(engine, None, max_tokens=2).tokens()) == 2
            seconds.append(time.perf_counter() - began)
        return seconds

    async def program(engine: hw.Engine) -> None:
        ratios = []
        for _ in range(3):  # the least: the machine may be busy
            alone = statistics.median(await bystander(engine))
            others = asyncio.gather(*(ambiguous(engine, seed) for seed in range(2)))
            ratios.append(statistics.median(await bystander(engine, others)) / (alone + 0.001))
            await others
            if ratios[-1] < 10:
                return
        pytest.fail(f"beside them it took {ratios} times as long")  # 50 times once

    words.run(program)
    assert words.stats().pages_held == 0


def test_a_row_of_the_parser_is_bounded_and_nothing_is_compiled_again(
    words: hw.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, compiled = matcher(words, LONG_ROWS), []
    monkeypatch.setattr(GrammarCache, "compile", lambda *_, **__: compiled.append(1))

    def follow() -> None:
        for _ in range(1000):
            followed.accept(int(np.flatnonzero(np.unpackbits(followed.mask().view(np.uint8), bitorder="little"))[-1]))

    with pytest.raises(hw.GrammarTooSlow, match=r"Current row has 1\d\d\d items; max is 1000"):
        follow()
    assert compiled == []  # a table of states of its own would not help it


def test_many_items_that_are_cheap_are_no_reason_to_end(words: hw.Engine) -> None:
    """A grammar for expressions is ambiguous in the usual way: it can be read in many ways, and quickly."""
    followed = matcher(words, EXPRESSIONS)
    for token in words.tokenizer.encode("x = " + "y + " * 60 + "z\n"):
        assert followed.mask()[token // 32] >> np.uint32(token % 32) & 1
        followed.accept(token)
    assert followed.may_end


def test_a_budget_ends_a_generation_and_is_shared_by_its_copies(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        limit = GrammarBudget(0.002)
        first = matcher(engine, AMBIGUOUS, budget=limit)
        second = first.copy()
        made = started(engine, first, max_tokens=400, min_tokens=400)
        with pytest.raises(hw.GrammarTooSlow, match=r"taken 0\.\d seconds; max_grammar_seconds is 0.002"):
            await made.tokens()
        assert limit.spent > limit.seconds
        with pytest.raises(hw.GrammarTooSlow, match="max_grammar_seconds"):
            second.mask()
        first.rollback(len(made.generated))  # what it did can be undone all the same
        made.context.release()

    words.run(program)
    assert words.stats().pages_held == 0


def test_an_engine_has_the_budget_of_its_generations(smollm2_path: Path) -> None:
    with pytest.raises(hw.InvalidInput, match="max_grammar_seconds is 0; it must be a number greater than 0"):
        hw.Engine(smollm2_path, max_grammar_seconds=0)
    runner = ScriptedRunner(49152, 16)
    with hw.Engine(smollm2_path, runner=runner, pages=100, threads=1, max_grammar_seconds=0.002) as engine:

        async def program(engine: hw.Engine) -> None:
            with pytest.raises(hw.GrammarTooSlow, match=r"max_grammar_seconds is 0.002"):
                await started(engine, AMBIGUOUS, max_tokens=400, min_tokens=400).tokens()

        engine.run(program)


@pytest.mark.parametrize("grammar", [OPEN, LETTER, NUMBERS, PLAIN], ids=["open", "letter", "numbers", "plain"])
@pytest.mark.parametrize("stop", [(), ("e",)], ids=["no stop", "stop"])
def test_a_slow_grammar_changes_no_token(
    words: hw.Engine, grammar: hw.Grammar, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drawn(engine: hw.Engine) -> list[Any]:
        found = []
        for seed in range(3):
            made = started(engine, grammar, seed, stop=stop)
            steps = [(step.tokens, step.text) async for step in made]
            found.append(([t for tokens, _ in steps for t in tokens], "".join(t for _, t in steps), made.finish))
        return found

    expected = words.run(drawn)
    monkeypatch.setattr(TokenTime, "is_slow", True)
    assert words.run(drawn) == expected


@pytest.mark.usefixtures("always_slow")
@pytest.mark.parametrize("grammar", [OPEN, LETTER, NUMBERS], ids=["open", "letter", "numbers"])
def test_cuts_forks_and_cancellation_under_a_slow_grammar(words: hw.Engine, grammar: hw.Grammar) -> None:
    async def program(engine: hw.Engine) -> None:
        rng = np.random.default_rng(4)
        expected = await started(engine, grammar).tokens()
        made = started(engine, grammar)
        for _ in range(60):
            if made.finish is not None:
                break
            task = asyncio.ensure_future(anext(made))
            for _ in range(int(rng.integers(12))):
                await asyncio.sleep(0)
            match int(rng.integers(4)):
                case 0:
                    task.cancel()
            await asyncio.wait([task])
            if made.finish is not None:
                break
            match int(rng.integers(6)):
                case 0:
                    made.context.truncate(int(rng.integers(min(5, 1 + len(made.generated)))))
                case 1:
                    made = made.fork()
                case 2:
                    made.forced()
            assert list(made.generated) == expected[: len(made.generated)]
        assert await made.tokens() == expected

    words.run(program)


def test_grammars_of_a_slow_batch_are_measured_one_by_one(words: hw.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are fast are computed together again, a few tokens later."""
    monkeypatch.setattr(batched_masks, "SUSPECT", 0.0)
    grammars = [matcher(words, PLAIN) for _ in range(6)]

    def advance() -> None:
        masks = [GrammarMask(grammar, frozenset(), words.vocab_size) for grammar in grammars]
        for mask in masks:
            mask.token = words.tokenizer.encode("a")[0]
        compute(masks)
        assert all(mask.accepted for mask in masks)
        assert all((mask.words() == masks[0].words()).all() for mask in masks)

    advance()
    assert all(grammar.is_slow and grammar.mask_matcher is None for grammar in grammars)
    monkeypatch.undo()
    count = 1
    while count < 200 and any(grammar.is_slow for grammar in grammars):  # later on a busy machine
        advance()
        count += 1
    assert count < 200
    alone = matcher(words, PLAIN)
    for _ in range(count):
        alone.accept(words.tokenizer.encode("a")[0])
    assert (alone.mask() == grammars[0].mask()).all()


@pytest.mark.parametrize("around", ["nothing", "bounds", "call", "n-grams"])
def test_nothing_is_compiled_again_in_the_event_loop(
    words: hw.Engine, monkeypatch: pytest.MonkeyPatch, around: str
) -> None:
    """A table of states that is full: whatever is around the grammar, a thread makes a new one."""
    monkeypatch.setitem(cache.LIMITS, "max_lexer_states", 6500)
    grammar = hw.Grammar.regex(f"(.*a.{{12}}b|[^c]*d.{{11}}e)Q{around}")
    compile_it, threads, texts = GrammarCache.compile, [], []

    def noted(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_it(*given, **options)

    monkeypatch.setattr(GrammarCache, "compile", noted)

    async def program(engine: hw.Engine) -> None:
        for seed in range(8):
            inner = await compile_async(grammar, engine.tokenizer, engine.vocab_size)
            limits: dict[str, Any] = {
                "nothing": inner,
                "bounds": TokenBounds(engine.vocab_size, None, BadWords(["zebra"], [], engine.tokenizer), inner),
                "call": FormatOrCall(engine.vocab_size, inner, [5]),
                "n-grams": inner,
            }
            n = 3 if around == "n-grams" else 0
            made = started(engine, limits[around], seed, max_tokens=12, no_repeat_ngram_size=n)
            texts.append(await made.tokens())

    words.run(program)
    assert len(threads) > 1  # else the table was never full
    assert all(name.startswith("headway-") for name in threads), threads
    for text in texts:
        alone = matcher(words, grammar)
        for token in text if text[:1] != [5] else ():
            alone.accept(token)


def test_compiling_has_a_limit_of_its_own_work(words: hw.Engine) -> None:
    """What is over is refused, while one that waits for others is not: the time that they take does not count."""
    compile(PLAIN, words.tokenizer, words.vocab_size)  # the first of a tokenizer takes long
    free = threading.Event()
    for _ in range(COMPILERS):  # all threads that compile
        _compilers().submit(free.wait, 60)

    async def compiled(engine: hw.Engine, seconds: float) -> GrammarMatcher:
        grammar = hw.Grammar.regex("a waiting (one|two)")
        return await compile_async(grammar, engine.tokenizer, engine.vocab_size, seconds=seconds)

    try:
        with pytest.raises(hw.GrammarTooSlow, match="took longer than 0 s; simplify it"):
            words.run(compiled, 0.0)
        threading.Timer(0.8, free.set).start()
        assert words.run(compiled, 0.4).mask().sum() > 0
    finally:
        free.set()


def test_the_clock_of_a_thread_counts_its_work_and_nobody_elses() -> None:
    clock, end = ThreadClock(), threading.Event()

    def spin() -> str:
        while not end.is_set():
            pass
        return "done"

    with ThreadPoolExecutor(1) as pool:
        assert clock.seconds == 0.0
        before = time.monotonic()
        work = pool.submit(clock.measured, spin)
        while clock.seconds < 0.05:
            time.sleep(0.005)
        assert clock.seconds <= time.monotonic() - before
        end.set()
        assert (work.result(), clock.seconds) == ("done", 0.0)
        waits = pool.submit(clock.measured, lambda: time.sleep(0.2))
        while not waits.done():
            assert clock.seconds < 0.1  # a thread that sleeps does no work
            time.sleep(0.005)


def test_a_slow_grammar_does_not_run_ahead(words: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        made, followed = started(engine, OPEN), []
        async for _ in made:
            constraint = made._transcript.constraint
            assert isinstance(constraint, GrammarMatcher)
            if len(made.generated) == 20:
                assert made._ahead.is_there
                constraint.pace.suspect()
            followed.append(made._ahead.is_there)
        assert False in followed[20:40]  # until it has shown that it is fast
        assert followed[-2]

    words.run(program)
