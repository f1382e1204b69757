"""Constraints: which tokens may come next. The protocol of such objects, and the compiled form of a `Grammar`.

A constraint follows one text, token by token; `rollback` and `copy` let it follow truncation, drafts and forks. It owns
no text and knows no passes. `constraints/cache.py` compiles grammars and keeps them. Programs in an event loop wait for
that in a thread pool of its own, so that compiling delays nothing else. `constraints/budget.py` bounds the time that
following one takes.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import numpy as np

from headway.base.errors import GrammarTooSlow, InvalidInput, InvalidToken, Unsupported, WrongType
from headway.base.system.machine import read_machine
from headway.base.text import short_repr
from headway.program.constraints.bitmask import MaskLayout
from headway.program.constraints.budget import (
    GrammarBudget,
    Postponed,
    ThreadClock,
    TokenTime,
    consume_unlocked,
    timed,
)
from headway.program.constraints.cache import (
    GrammarCache,
    brief,
    grammar_cache,
    limits_of_items,
    named,
    ready_grammar_cache,
)
from headway.program.constraints.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from headway.text.tokenizer import Tokenizer

Result = TypeVar("Result")
COMPILERS = 4  # threads that compile grammars for programs in event loops, at most: half of those for a model
TOO_AMBIGUOUS = re.compile("Too many items|Current row has [0-9]+ items")  # of the parser: see STEP_ITEMS
CHEAP = 0.002  # seconds; if the parser reaches its limit of items sooner, it gets the next one
REST = 1.0  # seconds that a thread rests after compiling, at most
TRIAL = 12  # tokens tried before a grammar is handed out


class Constraint(Protocol):
    """What `constrain=` takes: any object with `mask`, `accept` and `rollback`. It may have more, by these names:

    - `copy() -> Constraint`: an independent one in the same state; without it forking in the middle raises.
    - `forced() -> list[int]`: tokens of the only text that can follow, as the tokenizer would write it, [] when there
      is a choice; without it no tokens are fed ahead.
    - `may_end: bool`: the text so far is complete and end tokens are allowed; without it they are allowed where the
      mask allows them.
    - `finished: bool`: only the end can follow, so the generation ends; without it, it never ends by itself.
    - `wrapped: Constraint | None`: the constraint that it is around. Where that is a compiled grammar that takes long,
      it is followed in a thread before anything else is asked.
    - `in_program: bool`: it must be asked in its program's thread, because it looks at something that only that may.
      Then each token is a pass of its own, which waits for the program.

    Otherwise one thread of the engine's follows all such constraints while the device computes; in the program's thread
    it is asked where it has raised, forced tokens, taken long or looked at a context. It is never asked by two threads
    at once. Between two steps it may know tokens that the program has not taken yet; looking at the context takes them
    back.
    """

    def mask(self) -> np.ndarray | None:
        """The tokens that may come next: uint32 words over V, token i at bit i % 32 of word i // 32; None for all."""
        ...

    def accept(self, token: int) -> None:
        """One more token; raises and changes nothing when it is not allowed."""
        ...

    def rollback(self, n: int) -> None:
        """Take the last n tokens back."""
        ...


def innermost(constraint: object) -> object:
    """The constraint that others are around, or the constraint itself."""
    while (wrapped := getattr(constraint, "wrapped", None)) is not None:
        constraint = wrapped
    return constraint


def check_constraint(constrain: object) -> None:
    """Raise unless `constrain=` takes this."""
    if constrain is None or isinstance(constrain, Grammar):
        return
    lacks = [verb for verb in ("mask", "accept", "rollback") if not callable(getattr(constrain, verb, None))]
    if lacks or isinstance(constrain, type):
        raise WrongType(
            f"constrain is {short_repr(constrain)}, which is not a Grammar and has no {', '.join(lacks) or 'state'}; "
            "give "
            "Grammar.json_schema(...), .regex, .lark or .choices, or an object with mask(), accept() and rollback()"
        )


def compile(
    grammar: Grammar, tokenizer: Tokenizer, vocab_size: int, *, budget: GrammarBudget | None = None
) -> GrammarMatcher:
    """A constraint at the beginning of its text, for logits of width `vocab_size`. Compiled once per tokenizer.

    It may take about a second for the largest grammars that are allowed, without holding Python's global lock. Then it
    and its copies together follow their texts on one budget.
    """
    if not isinstance(grammar, Grammar):
        raise WrongType(f"{short_repr(grammar)} is not a Grammar; see Grammar.json_schema, .regex, .choices")
    cache = grammar_cache(tokenizer, min(vocab_size, tokenizer.vocab_size))
    kept = cache.get(grammar.key)
    if kept is None:
        cache.check_refused(grammar.key)
        try:
            kept = cache.compile(grammar), 0
            _try_out(grammar, GrammarMatcher(kept[0].deep_copy(), grammar, cache, tokenizer, vocab_size))
        except InvalidInput as error:
            cache.refuse(grammar.key, error)
            raise
        kept = cache.get(grammar.key) or kept  # trying it out may have found that it needs more room
        cache.put(grammar.key, kept[0].deep_copy(), kept[1])
    return GrammarMatcher(kept[0], grammar, cache, tokenizer, vocab_size, limit=kept[1], budget=budget)


async def compile_async(
    grammar: Grammar,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    budget: GrammarBudget | None = None,
    seconds: float = math.inf,
) -> GrammarMatcher:
    """The same for a program in an event loop: a cached one comes at once, another is compiled in a thread.

    Raises `GrammarTooSlow` after so many `seconds` of work. Those in which others are compiled, or other programs have
    the processor, do not count.
    """
    if (cached := _cached(grammar, tokenizer, vocab_size, budget)) is not None:
        return cached
    clock = ThreadClock()
    work = partial(clock.measured, partial(compile, grammar, tokenizer, vocab_size, budget=budget))
    task = asyncio.get_running_loop().run_in_executor(_compilers(), _with_rests, work)
    try:
        while True:
            left = None if math.isinf(seconds) else max(0.01, seconds - clock.seconds)
            if (await asyncio.wait({task}, timeout=left))[0]:
                return task.result()
            if clock.seconds >= seconds:
                raise GrammarTooSlow(f"compiling the grammar or schema took longer than {seconds:g} s; simplify it")
    finally:
        task.cancel()


@cache
def _compilers() -> ThreadPoolExecutor:
    count = max(1, min(COMPILERS, read_machine().fair_threads // 2))
    return ThreadPoolExecutor(count, thread_name_prefix="headway-compile")


_rest = threading.local()  # until when a thread rests


def _with_rests(work: Callable[[], Result]) -> Result:
    """The result of `work`. A thread that has worked rests as long before its next work: half of the time is for
    others."""
    time.sleep(max(0.0, getattr(_rest, "until", 0.0) - time.monotonic()))
    began = time.monotonic()
    try:
        return work()
    finally:
        ended = time.monotonic()
        _rest.until = ended + min(REST, ended - began)


def _cached(
    grammar: Grammar, tokenizer: Tokenizer, vocab_size: int, budget: GrammarBudget | None
) -> GrammarMatcher | None:
    """A grammar that was compiled before; None also while a cache is being created, which takes long."""
    cache = ready_grammar_cache(tokenizer, min(vocab_size, tokenizer.vocab_size))
    kept = None if cache is None else cache.get(grammar.key)
    if kept is None or cache is None:
        return None
    return GrammarMatcher(kept[0], grammar, cache, tokenizer, vocab_size, limit=kept[1], budget=budget)


class GrammarMatcher:
    """A compiled grammar that follows one text. End tokens are ours: the compiler never sees them.

    Where only one text can follow, the mask allows the tokenizer's encoding of it, and `accept` takes every encoding.
    Copies share a table of states that grows as they advance. When it is full, the grammar is compiled again with a
    table of its own, so that what a text may be never depends on the texts that others write. So it is, with more room,
    when the parser has many items that took little time.

    While it is slow, `accept` only notes a token that is known to be allowed. What follows from it is computed by
    `settle` in a thread, or by whoever asks first; one of them at a time. While it `hurries`, for somebody whom others
    wait for, it is not compiled again: it is slow from then on, a token that was drawn under its mask is noted, and
    asking for more raises `Postponed`.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: Grammar,
        cache: GrammarCache,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        limit: int = 0,
        budget: GrammarBudget | None = None,
    ) -> None:
        self._matcher, self._grammar, self._cache = matcher, grammar, cache
        self._tokenizer, self._vocab = tokenizer, vocab_size
        self._shares = True  # its table of states may hold those of other texts
        self._limit = limit  # which limit of items its parser has
        self.hurries = False
        self._is_over = False  # it failed, and more room would not help
        self._known = min(vocab_size, tokenizer.vocab_size)
        self._ends = tuple(id for id in tokenizer.eos_ids if id < vocab_size)
        self.layout = MaskLayout(self._known, vocab_size, self._ends)
        self._accepted: list[int] = []
        self._noted: list[int] = []  # the last of them, which the matcher has not consumed yet
        self._mask: np.ndarray | None = None  # of the current state
        self._count: int | None = None  # how many tokens of text it allows
        self._forced: list[int] | None = None  # of the current state
        self._sure: deque[int] = deque()  # tokens known to be allowed one after the other
        self._budget, self.pace = budget or GrammarBudget(), TokenTime()
        self._lock = threading.RLock()

    @property
    def may_end(self) -> bool:
        with self._lock:
            self._catch_up()
            return self._ended or self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        return self._allowed() == 0

    @property
    def mask_density(self) -> float:
        """The share of the vocabulary that may come next, end tokens aside."""
        return self._allowed() / self._vocab

    @property
    def is_slow(self) -> bool:
        """Whether it takes long to follow: then `settle` is for a thread, and no step may wait for its masks."""
        return self._limit > 0 or self.pace.is_slow

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """While others wait for this thread."""
        self.hurries = True
        try:
            yield
        finally:
            self.hurries = False

    def settle(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Compute all that is asked for next. Errors are left for whoever asks."""
        with self._lock, suppress(InvalidInput, Postponed):
            if is_wanted():
                self._catch_up()
                self.mask()
                self.forced()

    def mask(self) -> np.ndarray:
        with self._lock:
            if self._ended:
                return self.layout.only_ends()
            if self._mask is None:
                self._mask = self._compute()
            return self._mask

    def accept(self, token: int) -> None:
        if not 0 <= token < self._vocab:
            raise InvalidToken(f"token id {token} is outside the vocabulary; ids are 0 to {self._vocab - 1}")
        with self._lock:
            if token not in self._ends:
                self._accept_text(token)
            elif not self.may_end:
                raise self._not_allowed(token)
            self._moved(token)

    def _accept_text(self, token: int) -> None:
        sure = self._sure.popleft() if self._sure else None
        known = not self._ended and (token == sure or self._is_in_mask(token))
        if token != sure:
            self._sure.clear()
        if known and self.is_slow:
            self._noted.append(token)
            return
        try:
            self._catch_up()
            if not known and not self._is_allowed(token):
                raise self._not_allowed(token)
            self._consume(token)
        except Postponed:
            self._noted.append(token)

    def _is_allowed(self, token: int) -> bool:
        if self._ended or token >= self._known:
            return False
        if self._validates(token):
            return True
        if not self._is_full():
            return False
        self._renew()
        return self._validates(token)

    def _is_full(self) -> bool:
        """Whether the table of states is full. Then any token is refused, and nothing but a mask says why."""
        probe, row = self._matcher.deep_copy(), self.layout.buffer(1)
        self._timed(lambda: probe.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes), unlocked=False)
        return probe.is_error()

    def _validates(self, token: int) -> bool:
        return self._do(lambda m: m.validate_tokens([token])) == 1

    def _is_in_mask(self, token: int) -> bool:
        """Whether the mask is known and allows this token of text."""
        return self._mask is not None and bool(self._mask[token // 32] >> np.uint32(token % 32) & 1)

    def _not_allowed(self, token: int) -> InvalidInput:
        return InvalidInput(f"token {token} is not allowed after the {len(self._accepted)} tokens so far")

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._accepted):
            raise InvalidInput(f"{n} tokens cannot be rolled back; {len(self._accepted)} were accepted")
        with self._lock:
            text = sum(token not in self._ends for token in self._accepted[len(self._accepted) - n :])
            noted = min(text, len(self._noted))
            del self._noted[len(self._noted) - noted :]
            if self._matcher.is_error():
                self._is_over = False  # it starts again from what is left
            elif text > noted:
                self._do(lambda m: m.rollback(text - noted), free=True)
            self._mask = self._count = self._forced = None
            self._sure.clear()
            del self._accepted[len(self._accepted) - n :]

    def copy(self) -> GrammarMatcher:
        with self._lock:
            self._catch_up()
            twin = object.__new__(type(self))
            vars(twin).update(vars(self))
            twin._matcher, twin._accepted = self._matcher.deep_copy(), self._accepted[:]
            twin._noted, twin._sure, twin.pace, twin._lock = [], self._sure.copy(), self.pace.copy(), threading.RLock()
            self._shares = twin._shares = True
            return twin

    def __copy__(self) -> GrammarMatcher:
        return self.copy()

    def __deepcopy__(self, memo: object) -> GrammarMatcher:
        return self.copy()

    def __reduce__(self) -> NoReturn:
        raise Unsupported("a compiled grammar cannot be pickled; pickle the Grammar, or copy() it in this process")

    def forced(self) -> list[int]:
        with self._lock:
            if self._forced is None:
                self._forced = self._find_forced()
                self._sure = deque(self._forced)
            return list(self._forced)

    def _find_forced(self) -> list[int]:
        if self.may_end:
            return []  # the end is another way on
        tokens = self._do(lambda m: m.compute_ff_tokens())
        return tokens[: self._do(lambda m: m.validate_tokens(tokens))] if tokens else []

    # -- as one of many (headway.program.constraints.batched_masks) --

    def consumer(self, token: int) -> LLMatcher | None:
        """The matcher to give a token to unchecked, followed by `record` if it accepts; None: `accept` must check.

        A token is drawn under the mask of the grammar that then takes it, so it is nearly always allowed. A matcher
        that fails stays failed. `accept` compiles the grammar again once, as it does when the table of states is full,
        and can then tell a token that is not allowed from a text that cannot be followed. It does not if it has a table
        of its own already.
        """
        checks = self._ended or not self._shares or not 0 <= token < self._known or token in self._ends
        return None if checks or self._noted or self.is_slow else self._matcher

    def record(self, token: int) -> None:
        """Note a token that the matcher has consumed."""
        self._sure.clear()
        self._moved(token)

    def _moved(self, token: int) -> None:
        self._accepted.append(token)
        self._mask = self._count = self._forced = None
        self.pace.next_token()

    @property
    def mask_matcher(self) -> LLMatcher | None:
        """The matcher that must compute the mask; None where the mask is known or must be computed alone."""
        return None if self._ended or self._mask is not None or self._noted or self.is_slow else self._matcher

    @property
    def _ended(self) -> bool:
        return bool(self._accepted) and self._accepted[-1] in self._ends

    def _allowed(self) -> int:
        """How many tokens of text may come next."""
        with self._lock:
            if self._ended:
                return 0
            if self._count is None:
                self._mask = self._compute()
                assert self._count is not None
            return self._count

    def _compute(self) -> np.ndarray:
        self._catch_up()
        row = self.layout.buffer(1)
        self._do(lambda m: m.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))
        (mask,) = finish_masks([self], row)
        if isinstance(mask, InvalidInput):
            raise mask
        return mask

    def _catch_up(self) -> None:
        """Consume the tokens that were only noted."""
        while self._noted:
            self._consume(self._noted[0])
            del self._noted[0]

    def _consume(self, token: int) -> None:
        if self.is_slow:
            self._do(lambda m: consume_unlocked(m, token), unlocked=True)
        else:
            self._do(lambda m: m.consume_token(token))

    def _do(self, work: Callable[[LLMatcher], Result], *, unlocked: bool = False, free: bool = False) -> Result:
        """The result of `work`, on the request's budget unless it is `free`; once more where more room may help."""
        if not free:
            self._budget.check()
        if self._matcher.is_error() and not self._is_over:
            self._renew()  # it failed as one of many
        result, seconds = self._timed(lambda: work(self._matcher), unlocked=unlocked)
        if self._matcher.is_error() and not self._is_over:
            if self._has_another_chance(seconds):
                self._renew()
                result, _ = self._timed(lambda: work(self._matcher), unlocked=unlocked)
            self._is_over = self._matcher.is_error()
        if self._is_over:
            raise self._failure()
        return result

    def _timed(self, work: Callable[[], Result], *, unlocked: bool) -> tuple[Result, float]:
        result, seconds = timed(work, unlocked=unlocked)
        self._budget.spent += seconds
        self.pace.add(seconds)
        return result, seconds

    def _has_another_chance(self, seconds: float) -> bool:
        """Whether a failed matcher may go on with more room, for states or for items; those came within `seconds`."""
        if not TOO_AMBIGUOUS.search(self._matcher.get_error()):
            return self._shares
        if seconds > CHEAP or self._limit + 1 == len(limits_of_items(self._grammar)):
            return False
        self._limit += 1
        return True

    def _renew(self) -> None:
        """Compile the grammar again, with more room or a table of its own, and follow the text so far."""
        if self.hurries:
            self.pace.suspect()
            raise Postponed("the grammar must be compiled again")
        self._cache.drop(self._grammar.key)
        self._matcher, self._shares = self._cache.compile(self._grammar, self._limit), False
        if self._limit > 0:
            self._cache.put(self._grammar.key, self._matcher.deep_copy(), self._limit)  # others will want the room too
            self._shares = True
        text = [token for token in self._accepted if token not in self._ends]
        for token in text[: len(text) - len(self._noted)]:  # one by one: each holds Python's global lock
            self._timed(partial(self._matcher.consume_token, token), unlocked=False)

    def _failure(self) -> InvalidInput:
        """Why the matcher cannot go on."""
        what = f"the grammar cannot be followed after {len(self._accepted)} tokens: {brief(self._matcher.get_error())}"
        if not TOO_AMBIGUOUS.search(what):
            return InvalidInput(what)
        return GrammarTooSlow(f"{what}; make it less ambiguous, so that a text can be read in one way only")


def finish_masks(grammars: Sequence[GrammarMatcher], written: np.ndarray) -> list[np.ndarray | InvalidInput]:
    """The masks of grammars with the same layout, from what their matchers wrote; an error where nothing is allowed."""
    layout = grammars[0].layout
    masks, counts = layout.without_ends(written)
    complete = [i for i, grammar in enumerate(grammars) if grammar._matcher.is_accepting()]
    layout.allow_ends(masks, complete)
    masks.flags.writeable = False
    rows: list[np.ndarray | InvalidInput] = list(masks)
    for i in {i for i, count in enumerate(counts) if not count}.difference(complete):
        rows[i] = InvalidInput(
            f"the grammar allows nothing after {len(grammars[i]._accepted)} tokens and the text is not complete: "
            "it has a dead end, or asks for an end token or a text that the vocabulary cannot write"
        )
    for grammar, row, count in zip(grammars, rows, counts, strict=True):
        grammar._count = None if isinstance(row, InvalidInput) else count
    return rows


def _try_out(grammar: Grammar, trial: GrammarMatcher) -> None:
    """Try the first tokens: a grammar that allows nothing or explodes at once is refused before it is used."""
    trial.pace.suspect()  # what it takes is not known yet
    try:
        for i in range(TRIAL):
            if trial.finished:
                return
            allowed = np.flatnonzero(np.unpackbits(trial.mask().view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, trial.layout.ends)]
            trial.accept(int(allowed[(i * 7919) % len(allowed)]))
            trial.pace.suspect()
        trial._catch_up()
    except InvalidInput as error:
        raise type(error)(f"{named(grammar)} cannot be used: {error}") from None
