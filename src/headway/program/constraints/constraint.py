"""Constraints: which tokens may come next. The compiled form of a `Grammar`, and the shape of any object that does it.

A constraint follows one text, token by token; `rollback` and `copy` let it follow truncates, drafts and forks. It owns
no text and knows nothing of passes. Grammars are compiled and kept elsewhere (headway.program.constraints.cache). Programs in an
event loop wait for that in a few threads that are there for this alone: nothing else waits behind them.
"""  # noqa: E501

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from headway.base.errors import InvalidInput, InvalidToken, WrongType
from headway.program.constraints.bitmask import MaskWords
from headway.program.constraints.cache import Shelf, brief, made_shelf, named, shelf_of
from headway.program.constraints.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from headway.text.tokenizer import Tokenizer

Result = TypeVar("Result")
COMPILERS = 4  # grammars that are compiled at a time for programs in event loops
REHEARSAL = 12  # tokens tried before a grammar is handed out


class Constraint(Protocol):
    """What `constrain=` takes: any object with `mask`, `accept` and `rollback`. It may have more, by these names:

    - `copy() -> Constraint`: one in the same state that goes its own way; without it forking in the middle raises.
    - `forced() -> list[int]`: tokens of the only text that can follow, as the tokenizer would write it, [] when there
      is a choice; without it nothing is fed ahead.
    - `may_end: bool`: the text so far is complete and end tokens are allowed; without it they are allowed where the
      mask allows them.
    - `finished: bool`: nothing but the end can follow, so the generation ends; without it, it never ends by itself.

    Its time is the program's own: a slow mask holds up no other program.
    """

    def mask(self) -> np.ndarray | None:
        """The tokens that may come next: packed uint32 words over V, bit i % 32 of word i // 32; None for all."""
        ...

    def accept(self, token: int) -> None:
        """One more token; raises and changes nothing when it is not allowed."""
        ...

    def rollback(self, n: int) -> None:
        """Take the last n tokens back."""
        ...


def check_constraint(constrain: object) -> None:
    """Raise unless this is what `constrain=` takes."""
    if constrain is None or isinstance(constrain, Grammar):
        return
    lacks = [verb for verb in ("mask", "accept", "rollback") if not callable(getattr(constrain, verb, None))]
    if lacks or isinstance(constrain, type):
        raise WrongType(
            f"constrain is {constrain!r:.60}, which is no Grammar and has no {', '.join(lacks) or 'state'}; it takes "
            "Grammar.json_schema(...), .regex, .lark or .choices, or an object with mask(), accept() and rollback()"
        )


def compile(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> Matched:
    """A constraint at the beginning of its text, for logits of width `vocab_size`. Compiled once per tokenizer.

    It may take up to about a second for the largest grammars that are allowed, without holding the interpreter's lock.
    """
    if not isinstance(grammar, Grammar):
        raise WrongType(f"a Grammar is needed, not {type(grammar).__name__}; see Grammar.json_schema, .regex, .choices")
    shelf = shelf_of(tokenizer, min(vocab_size, tokenizer.vocab_size))
    matcher = shelf.taken(grammar.key)
    if matcher is None:
        matcher = shelf.made(grammar)
        _rehearse(grammar, Matched(matcher.deep_copy(), grammar, shelf, tokenizer, vocab_size))
        shelf.put(grammar.key, matcher.deep_copy())
    return Matched(matcher, grammar, shelf, tokenizer, vocab_size)


async def compiled(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> Matched:
    """The same for a program in an event loop: one that is kept comes at once, another is compiled in a thread."""
    found = _kept(grammar, tokenizer, vocab_size)
    if found is not None:
        return found
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_compilers(), compile, grammar, tokenizer, vocab_size)


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COMPILERS, thread_name_prefix="headway-compile")


def _kept(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> Matched | None:
    """A grammar that was compiled before; None also while a shelf is being made, which takes long."""
    shelf = made_shelf(tokenizer, min(vocab_size, tokenizer.vocab_size))
    matcher = None if shelf is None else shelf.taken(grammar.key)
    return None if matcher is None or shelf is None else Matched(matcher, grammar, shelf, tokenizer, vocab_size)


class Matched:
    """A compiled grammar that follows one text. End tokens are ours: the compiler never sees them.

    Where only one text can follow, the mask allows it as the tokenizer spells it, and `accept` takes every spelling.
    Copies share a table of states that grows as they are followed. When it is full, one compiled anew takes its place,
    so that what a text may be never depends on the texts that others write.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: Grammar,
        shelf: Shelf,
        tokenizer: Tokenizer,
        vocab_size: int,
    ) -> None:
        self._matcher, self._grammar, self._shelf = matcher, grammar, shelf
        self._tokenizer, self._vocab = tokenizer, vocab_size
        self._shares = True  # its table may have the states of other texts
        self._known = min(vocab_size, tokenizer.vocab_size)
        self._ends = tuple(id for id in tokenizer.eos_ids if id < vocab_size)
        self.words = MaskWords(self._known, vocab_size, self._ends)
        self._accepted: list[int] = []
        self._mask: np.ndarray | None = None  # of the state as it is
        self._open: int | None = None  # how many tokens of text it allows

    @property
    def may_end(self) -> bool:
        return self._ended or self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        return self._allowed() == 0

    @property
    def breadth(self) -> float:
        """The share of the vocabulary that may come next, end tokens aside."""
        return self._allowed() / self._vocab

    def mask(self) -> np.ndarray:
        if self._ended:
            return self.words.only_ends()
        if self._mask is None:
            self._mask = self._computed()
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
        self.took(token)

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._accepted):
            raise InvalidInput(f"{n} tokens cannot be taken back; {len(self._accepted)} were accepted")
        text = sum(token not in self._ends for token in self._accepted[len(self._accepted) - n :])
        if text:
            self._do(lambda m: m.rollback(text))
        self._mask = self._open = None
        del self._accepted[len(self._accepted) - n :]

    def copy(self) -> Matched:
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

    def taker(self, token: int) -> LLMatcher | None:
        """What can be given a token without asking first, and `took` follows if it takes it; None: `accept` must ask.

        A token is drawn under the mask of the grammar that then takes it, so asking is nearly always in vain. What has
        failed stays so, but `accept` makes it anew once, as it does when the table is full, and can then tell a token
        that is not allowed from a text that cannot be followed. Once it has a table of its own it can do so no more.
        """
        asks = self._ended or not self._shares or not 0 <= token < self._known or token in self._ends
        return None if asks else self._matcher

    def took(self, token: int) -> None:
        """The taker has taken the token."""
        self._accepted.append(token)
        self._mask = self._open = None

    @property
    def masker(self) -> LLMatcher | None:
        """What computes the mask; None where that is done."""
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
        if self._open is None:
            self._mask = self._computed()
            assert self._open is not None
        return self._open

    def _computed(self) -> np.ndarray:
        found = self.words.room(1)
        self._do(lambda m: m.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes))
        (mask,) = settle([self], found)
        if isinstance(mask, InvalidInput):
            raise mask
        return mask

    def _do(self, work: Callable[[LLMatcher], Result]) -> Result:
        """What work gives, once more on a table of its own where the shared one is full."""
        result = work(self._matcher)
        if self._matcher.is_error() and self._shares:
            self._shelf.drop(self._grammar.key)
            self._matcher, self._shares = self._shelf.made(self._grammar), False
            self._matcher.consume_tokens(self._text())
            result = work(self._matcher)
        if self._matcher.is_error():
            why = brief(self._matcher.get_error())
            raise InvalidInput(f"the grammar cannot be followed after {len(self._accepted)} tokens: {why}")
        return result


def settle(grammars: Sequence[Matched], found: np.ndarray) -> list[np.ndarray | InvalidInput]:
    """The masks of grammars that are laid out alike, from what their matchers wrote; an error where there is none."""
    layout = grammars[0].words
    masks, counts = layout.text(found)
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
        grammar._open = None if isinstance(row, InvalidInput) else count
    return rows


def _rehearse(grammar: Grammar, trial: Matched) -> None:
    """Try the first tokens: a grammar that allows nothing or explodes at once is refused before it is used."""
    try:
        for turn in range(REHEARSAL):
            if trial.finished:
                return
            allowed = np.flatnonzero(np.unpackbits(trial.mask().view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, trial.words.ends)]
            trial.accept(int(allowed[(turn * 7919) % len(allowed)]))
    except InvalidInput as error:
        raise InvalidInput(f"{named(grammar)} cannot be used: {error}") from None
