"""Constraints: which tokens may come next. The protocol of such objects, and the compiled form of a `Grammar`.

A constraint follows one text, token by token; `rollback` and `copy` let it follow truncation, drafts and forks. It owns
no text and knows no passes. `constraints/cache.py` compiles grammars and keeps them. Programs in an event loop wait for
that in a thread pool of its own, so that compiling delays nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from headway.base.errors import InvalidInput, InvalidToken, WrongType
from headway.base.text import short_repr
from headway.program.constraints.bitmask import MaskLayout
from headway.program.constraints.cache import GrammarCache, brief, grammar_cache, named, ready_grammar_cache
from headway.program.constraints.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from headway.text.tokenizer import Tokenizer

Result = TypeVar("Result")
COMPILERS = 4  # threads that compile grammars for programs in event loops
TRIAL = 12  # tokens tried before a grammar is handed out


class Constraint(Protocol):
    """What `constrain=` takes: any object with `mask`, `accept` and `rollback`. It may have more, by these names:

    - `copy() -> Constraint`: an independent one in the same state; without it forking in the middle raises.
    - `forced() -> list[int]`: tokens of the only text that can follow, as the tokenizer would write it, [] when there
      is a choice; without it no tokens are fed ahead.
    - `may_end: bool`: the text so far is complete and end tokens are allowed; without it they are allowed where the
      mask allows them.
    - `finished: bool`: only the end can follow, so the generation ends; without it, it never ends by itself.

    It runs in the program's own time: a slow mask delays no other program.
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


def compile(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> GrammarMatcher:
    """A constraint at the beginning of its text, for logits of width `vocab_size`. Compiled once per tokenizer.

    It may take about a second for the largest grammars that are allowed, without holding Python's global lock.
    """
    if not isinstance(grammar, Grammar):
        raise WrongType(f"{short_repr(grammar)} is not a Grammar; see Grammar.json_schema, .regex, .choices")
    cache = grammar_cache(tokenizer, min(vocab_size, tokenizer.vocab_size))
    matcher = cache.get(grammar.key)
    if matcher is None:
        matcher = cache.compile(grammar)
        _try_out(grammar, GrammarMatcher(matcher.deep_copy(), grammar, cache, tokenizer, vocab_size))
        cache.put(grammar.key, matcher.deep_copy())
    return GrammarMatcher(matcher, grammar, cache, tokenizer, vocab_size)


async def compile_async(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> GrammarMatcher:
    """The same for a program in an event loop: a cached one comes at once, another is compiled in a thread."""
    if (cached := _cached(grammar, tokenizer, vocab_size)) is not None:
        return cached
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_compilers(), compile, grammar, tokenizer, vocab_size)


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COMPILERS, thread_name_prefix="headway-compile")


def _cached(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> GrammarMatcher | None:
    """A grammar that was compiled before; None also while a cache is being created, which takes long."""
    cache = ready_grammar_cache(tokenizer, min(vocab_size, tokenizer.vocab_size))
    matcher = None if cache is None else cache.get(grammar.key)
    return None if matcher is None or cache is None else GrammarMatcher(matcher, grammar, cache, tokenizer, vocab_size)


class GrammarMatcher:
    """A compiled grammar that follows one text. End tokens are ours: the compiler never sees them.

    Where only one text can follow, the mask allows the tokenizer's encoding of it, and `accept` takes every encoding.
    Copies share a table of states that grows as they advance. When it is full, the grammar is compiled again with a
    table of its own, so that what a text may be never depends on the texts that others write.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: Grammar,
        cache: GrammarCache,
        tokenizer: Tokenizer,
        vocab_size: int,
    ) -> None:
        self._matcher, self._grammar, self._cache = matcher, grammar, cache
        self._tokenizer, self._vocab = tokenizer, vocab_size
        self._shares = True  # its table of states may hold those of other texts
        self._known = min(vocab_size, tokenizer.vocab_size)
        self._ends = tuple(id for id in tokenizer.eos_ids if id < vocab_size)
        self.layout = MaskLayout(self._known, vocab_size, self._ends)
        self._accepted: list[int] = []
        self._mask: np.ndarray | None = None  # of the current state
        self._count: int | None = None  # how many tokens of text it allows

    @property
    def may_end(self) -> bool:
        return self._ended or self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        return self._allowed() == 0

    @property
    def mask_density(self) -> float:
        """The share of the vocabulary that may come next, end tokens aside."""
        return self._allowed() / self._vocab

    def mask(self) -> np.ndarray:
        if self._ended:
            return self.layout.only_ends()
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def accept(self, token: int) -> None:
        if not 0 <= token < self._vocab:
            raise InvalidToken(f"token id {token} is outside the vocabulary; ids are 0 to {self._vocab - 1}")
        if token in self._ends:
            allowed = self.may_end
        else:
            allowed = not self._ended and token < self._known and self._do(lambda m: m.validate_tokens([token])) == 1
        if not allowed:
            raise InvalidInput(f"token {token} is not allowed after the {len(self._accepted)} tokens so far")
        if token not in self._ends:
            self._do(lambda m: m.consume_token(token))
        self.record(token)

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._accepted):
            raise InvalidInput(f"{n} tokens cannot be rolled back; {len(self._accepted)} were accepted")
        text = sum(token not in self._ends for token in self._accepted[len(self._accepted) - n :])
        if text:
            self._do(lambda m: m.rollback(text))
        self._mask = self._count = None
        del self._accepted[len(self._accepted) - n :]

    def copy(self) -> GrammarMatcher:
        twin = copy(self)
        twin._matcher, twin._accepted = self._matcher.deep_copy(), self._accepted[:]
        self._shares = twin._shares = True
        return twin

    def forced(self) -> list[int]:
        if self.may_end:
            return []  # the end is another way on
        tokens = self._do(lambda m: m.compute_ff_tokens())
        return tokens[: self._do(lambda m: m.validate_tokens(tokens))] if tokens else []

    # -- as one of many (headway.program.constraints.batch) --

    def consumer(self, token: int) -> LLMatcher | None:
        """The matcher to give a token to unchecked, followed by `record` if it accepts; None: `accept` must check.

        A token is drawn under the mask of the grammar that then takes it, so it is nearly always allowed. A matcher
        that fails stays failed. `accept` compiles the grammar again once, as it does when the table of states is full,
        and can then tell a token that is not allowed from a text that cannot be followed. It does not if it has a table
        of its own already.
        """
        checks = self._ended or not self._shares or not 0 <= token < self._known or token in self._ends
        return None if checks else self._matcher

    def record(self, token: int) -> None:
        """Note a token that the matcher has consumed."""
        self._accepted.append(token)
        self._mask = self._count = None

    @property
    def mask_matcher(self) -> LLMatcher | None:
        """The matcher that must compute the mask; None where the mask is known."""
        return None if self._ended or self._mask is not None else self._matcher

    @property
    def _ended(self) -> bool:
        return bool(self._accepted) and self._accepted[-1] in self._ends

    def _text(self) -> list[int]:
        return [token for token in self._accepted if token not in self._ends]

    def _allowed(self) -> int:
        """How many tokens of text may come next."""
        if self._ended:
            return 0
        if self._count is None:
            self._mask = self._compute()
            assert self._count is not None
        return self._count

    def _compute(self) -> np.ndarray:
        row = self.layout.buffer(1)
        self._do(lambda m: m.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))
        (mask,) = finish_masks([self], row)
        if isinstance(mask, InvalidInput):
            raise mask
        return mask

    def _do(self, work: Callable[[LLMatcher], Result]) -> Result:
        """The result of `work`; once more on a table of its own where the shared one is full."""
        result = work(self._matcher)
        if self._matcher.is_error() and self._shares:
            self._cache.drop(self._grammar.key)
            self._matcher, self._shares = self._cache.compile(self._grammar), False
            self._matcher.consume_tokens(self._text())
            result = work(self._matcher)
        if self._matcher.is_error():
            why = brief(self._matcher.get_error())
            raise InvalidInput(f"the grammar cannot be followed after {len(self._accepted)} tokens: {why}")
        return result


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
    try:
        for i in range(TRIAL):
            if trial.finished:
                return
            allowed = np.flatnonzero(np.unpackbits(trial.mask().view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, trial.layout.ends)]
            trial.accept(int(allowed[(i * 7919) % len(allowed)]))
    except InvalidInput as error:
        raise InvalidInput(f"{named(grammar)} cannot be used: {error}") from None
