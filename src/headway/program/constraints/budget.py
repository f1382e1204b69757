"""What following a grammar costs: a time budget for each request, and a thread for grammars that are slow to follow.

A mask takes well under a millisecond under most grammars, and is computed wherever it is needed. An ambiguous grammar,
or one whose lexer keeps finding new states, takes longer with every token. Such a grammar is followed in one thread for
all of them, which works half of the time at most: its own text waits, and the steps of others go on. Limits in
`constraints/cache.py` bound a single call; the budget bounds all calls of a request, and ends it with `GrammarTooSlow`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from headway.base.errors import GrammarTooSlow, HeadwayError
from headway.base.system.machine import read_machine

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

SECONDS = 10.0  # a request's budget unless told otherwise
SLOW = 0.002  # seconds of work for a token, on average, from which a grammar is slow
RECENT = 0.25  # the share of the last token in that average
SUSPECT = 0.01  # seconds for many masks at once, from which each grammar among them is measured by itself
HANDOVER = 0.005  # seconds that a thread may wait for Python's global lock, which are not the grammar's
THREADS = 8  # at most: the device's worker and the event loop need cores too


class Postponed(HeadwayError):
    """A grammar must be compiled again, which takes long: `settle` will, and whoever hurries does without."""


class GrammarBudget:
    """The time that the grammars of one request may take, compiling aside, and what they have taken of it."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds, self.spent = seconds, 0.0

    def check(self) -> None:
        """Raise if nothing is left."""
        if self.spent > self.seconds:
            raise GrammarTooSlow(
                f"following the grammar has taken {self.spent:.1f} seconds; max_grammar_seconds is {self.seconds:g}: "
                "make the grammar less ambiguous, so that a text can be read in one way only, or ask for fewer tokens"
            )


class TokenTime:
    """How long a grammar takes for a token, on average over the last few."""

    def __init__(self, average: float = 0.0) -> None:
        self._average = average

    @property
    def is_slow(self) -> bool:
        return self._average > SLOW

    def copy(self) -> TokenTime:
        return TokenTime(self._average)

    def add(self, seconds: float) -> None:
        """Work for the current token."""
        self._average += seconds * RECENT

    def next_token(self) -> None:
        self._average *= 1 - RECENT

    def suspect(self) -> None:
        """It may be slow: count it so until it has shown otherwise."""
        self._average = max(self._average, 2 * SLOW)


# --- the thread for slow grammars


async def settle(constraint: Any) -> None:
    """Have what the next step needs of a constraint that is slow computed in the thread; errors come with the step.

    A constraint that waits for somebody else has an async method `settle_async` instead.
    """
    if (waits := getattr(constraint, "settle_async", None)) is not None:
        return await waits()
    job = _Job(constraint)
    try:
        await asyncio.get_running_loop().run_in_executor(_slow_thread(), job.run)
    finally:
        job.wanted = False


class _Job:
    """One token's work for one constraint. Jobs of several take turns, since each has one at a time."""

    def __init__(self, constraint: Any) -> None:
        self._constraint, self.wanted = constraint, True

    def run(self) -> None:
        if not self.wanted:
            return
        began = time.perf_counter()
        self._constraint.settle(lambda: self.wanted)
        time.sleep(time.perf_counter() - began)  # half of the time is for others


@cache
def _slow_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="headway-slow-grammars")


# --- the grammar library's own threads


@cache
def executor() -> LLExecutor:
    """The grammar library's threads, which do not hold Python's global lock."""
    from llguidance import LLExecutor

    return LLExecutor(min(THREADS, read_machine().fair_threads))


def consume_unlocked(matcher: LLMatcher, token: int) -> bool:
    """`matcher.consume_token` without Python's global lock, which the library releases for two matchers and more."""
    return executor().consume_token_par([(matcher, token), (_failed().deep_copy(), token)])[0]


@cache
def _failed() -> LLMatcher:
    """A matcher in its error state, which takes no token and no time."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), "start: missing", log_level=0)
    assert matcher.is_error()
    return matcher


class ThreadClock:
    """How long a thread has worked on something, for others to read while it does."""

    def __init__(self) -> None:
        self._read: Callable[[], float] | None = None
        self._began = 0.0

    def measured(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, which this thread does now."""
        clock = time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None
        read = time.monotonic if clock is None else partial(time.clock_gettime, clock)
        self._began, self._read = read(), read
        try:
            return work()
        finally:
            self._read = None  # the thread may end, and its clock with it

    @property
    def seconds(self) -> float:
        """Of the processor, where that can be known; 0 before and after."""
        read = self._read
        return 0.0 if read is None else read() - self._began


def timed(work: Callable[[], Any], *, unlocked: bool = False) -> tuple[Any, float]:
    """The result of `work` and the seconds it took: of this thread, or of others if it is done `unlocked`."""
    if unlocked:
        began = time.perf_counter()
        return work(), max(0.0, time.perf_counter() - began - HANDOVER)
    began = time.thread_time()
    return work(), time.thread_time() - began
