"""allowed_token_ids and bad_words as a constraint.

A bad word given as token ids is that sequence. One given as text must not be generated as a run of whole tokens, at the
start or after a space, however it is tokenized; inside a longer token it is part of another word.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from headway.base.errors import InvalidInput
from headway.program.constraints.constraint import Constraint
from headway.text.tokenizer import Tokenizer


class BadWords:
    """Words that must not be generated: tracks those that have begun and the tokens that would complete one.

    Words that begin alike are tracked as one, so that a token costs no more than a step for each place before it where
    one of them may have begun.
    """

    def __init__(self, texts: Iterable[str], sequences: Iterable[Sequence[int]], tokenizer: Tokenizer | None) -> None:
        spaced = (spelled for text in texts for spelled in (text, " " + text.lstrip(" ")))
        self._tokenizer = tokenizer
        self._texts = _Words(text.encode() for text in spaced)
        if tokenizer is not None and self._texts:
            ids = ids_by_bytes(tokenizer)
            self._texts.complete(lambda rest: ids.get(rest, ()), longest_token(tokenizer))
        self._sequences = _Words(map(tuple, sequences))
        self._sequences.complete(lambda rest: rest, 1)
        self._always = self._texts.completed(WHOLE) | self._sequences.completed(WHOLE)
        self._open: list[_Matched] = [_Matched()]  # after each token, the words that have begun

    def __bool__(self) -> bool:
        return bool(self._texts) or bool(self._sequences)

    def fresh(self) -> BadWords:
        """The same words, before any token."""
        copy = object.__new__(BadWords)
        copy.__dict__.update(self.__dict__)
        copy._open = [_Matched()]
        return copy

    def copy(self) -> BadWords:
        """A copy after the same tokens."""
        copy = self.fresh()
        copy._open = list(self._open)
        return copy

    def forbidden(self) -> Set[int]:
        """The tokens that would complete a word."""
        begun = self._open[-1]
        sets = [self._texts.completed(place) for place in begun.texts]
        sets += [self._sequences.completed(place) for place in begun.sequences]
        return self._always.union(*sets) if sets else self._always

    def push(self, token: int) -> None:
        """Add a token."""
        begun = self._open[-1]
        spelled = self._spelled(token) if self._texts else b""
        texts = self._texts.advance(begun.texts, spelled) if spelled else ()
        self._open.append(_Matched(texts, self._sequences.advance(begun.sequences, (token,))))

    def drop(self, n: int) -> None:
        """Remove the last n tokens."""
        del self._open[len(self._open) - n :]

    def _spelled(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


Place = tuple[int, int]  # the first of the sorted words with some beginning, and that beginning's length
WHOLE: Place = (0, 0)  # no word has begun


class _Matched(NamedTuple):
    """How far words have matched."""

    texts: tuple[Place, ...] = ()
    sequences: tuple[Place, ...] = ()


class _Words:
    """Words as bytes or as token ids, sorted: those with the same beginning stand side by side."""

    def __init__(self, words: Iterable[Any]) -> None:
        self._sorted: list[Any] = sorted(set(words))
        self._completed: dict[Place, frozenset[int]] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def complete(self, ids: Callable[[Any], Iterable[int]], longest: int) -> None:
        """Find the tokens that complete a word, by its beginning: `ids` are those of an end, `longest` its length."""
        completed: dict[Place, set[int]] = {}
        for word in self._sorted:
            for depth in range(max(0, len(word) - longest), len(word)):
                if tokens := ids(word[depth:]):
                    completed.setdefault(self._place(word[:depth]), set()).update(tokens)
        self._completed = {place: frozenset(tokens) for place, tokens in completed.items()}

    def completed(self, place: Place) -> frozenset[int]:
        """The tokens that complete a word from here."""
        return self._completed.get(place, frozenset())

    def advance(self, places: Iterable[Place], more: Any) -> tuple[Place, ...]:
        """Where the words stand after `more`, one of them perhaps beginning with it."""
        reached = []
        for first, depth in (*places, WHOLE):
            beginning = self._sorted[first][:depth] + more if self._sorted else more
            place = self._place(beginning)
            if self._is_longer(place[0], beginning):
                reached.append(place)
        return tuple(reached)

    def _place(self, beginning: Any) -> Place:
        return bisect_left(self._sorted, beginning), len(beginning)

    def _is_longer(self, first: int, beginning: Any) -> bool:
        """Whether a word begins like this and goes on; the shortest such word comes first."""
        rest = self._sorted[first : first + 2]
        return any(len(word) > len(beginning) and word[: len(beginning)] == beginning for word in rest)


class TokenBounds:
    """Allows what `other` allows (everything if None), restricted to the allowed ids, without bad words.

    It never forces tokens: each one is sampled in a pass, which gives its log-probability.
    """

    def __init__(
        self,
        vocab: int,
        allowed: Iterable[int] | None = None,
        words: BadWords | None = None,
        other: Constraint | None = None,
    ) -> None:
        self._vocab = vocab
        self._allowed = None if allowed is None else packed_mask(allowed, vocab)
        self._all = packed_mask(range(vocab), vocab) if words else None
        self._words = words.fresh() if words else None
        self._other = other
        self._count = 0

    def mask(self) -> np.ndarray | None:
        bits = None if self._other is None else self._other.mask()
        if self._allowed is not None:
            bits = self._allowed if bits is None else bits & self._allowed
        if forbidden := self._forbidden():
            all_but = ~packed_mask(forbidden, self._vocab)
            assert self._all is not None
            bits = (self._all if bits is None else bits) & all_but
        if bits is not None and not bits.any():
            raise InvalidInput(
                f"no token is allowed after {self._count} tokens: allowed_token_ids, bad_words and the required format "
                "exclude all of them; relax one"
            )
        return bits

    def accept(self, token: int) -> None:
        if token in self._forbidden():
            raise InvalidInput(f"token {token} would complete one of bad_words")
        if self._allowed is not None and not self._allowed[token // 32] >> np.uint32(token % 32) & 1:
            raise InvalidInput(f"token {token} is not one of allowed_token_ids")
        if self._other is not None:
            self._other.accept(token)
        if self._words is not None:
            self._words.push(token)
        self._count += 1

    def rollback(self, n: int) -> None:
        if self._other is not None:
            self._other.rollback(n)
        if self._words is not None:
            self._words.drop(n)
        self._count -= n

    def copy(self) -> TokenBounds:
        copy = object.__new__(TokenBounds)
        copy.__dict__.update(self.__dict__)
        other: Any = self._other
        copy._other = None if other is None else other.copy()
        copy._words = None if self._words is None else self._words.copy()
        return copy

    @property
    def wrapped(self) -> Constraint | None:
        return self._other

    @property
    def may_end(self) -> bool:
        return bool(getattr(self._other, "may_end", True))

    @property
    def finished(self) -> bool:
        return bool(getattr(self._other, "finished", False))

    def _forbidden(self) -> Set[int]:
        return frozenset() if self._words is None else self._words.forbidden()


def packed_mask(ids: Iterable[int], vocab: int) -> np.ndarray:
    """A packed mask that allows these ids: uint32 words, bit i % 32 of word i // 32."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.fromiter(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


# -- tokens by their bytes ---------------------------------------------------------------------------------------------

_ids_by_tokenizer: weakref.WeakKeyDictionary[Tokenizer, dict[bytes, tuple[int, ...]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, tuple[int, ...]]:
    """The ordinary tokens by their bytes. Computed once per tokenizer, which takes a moment."""
    with _lock:
        if tokenizer not in _ids_by_tokenizer:
            result: dict[bytes, tuple[int, ...]] = {}
            for id in range(tokenizer.vocab_size):
                if id in tokenizer.special_ids or not tokenizer.has(id):
                    continue
                spelled = tokenizer.token_bytes(id)
                result[spelled] = (*result.get(spelled, ()), id)
            _ids_by_tokenizer[tokenizer] = result
        return _ids_by_tokenizer[tokenizer]


def longest_token(tokenizer: Tokenizer) -> int:
    """The length of the longest token in bytes."""
    return max(map(len, ids_by_bytes(tokenizer)), default=1)
