"""allowed_token_ids and bad_words as a constraint.

A bad word given as token ids is that sequence. One given as text must not be generated as a run of whole tokens, at the
start or after a space, however it is tokenized; inside a longer token it is part of another word.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from headway.base.errors import InvalidInput
from headway.program.constraints.budget import is_slow
from headway.program.constraints.constraint import Constraint
from headway.text.tokenizer import Tokenizer


class BadWords:
    """Words that must not be generated: tracks those that have begun and the tokens that would complete one."""

    def __init__(self, texts: Iterable[str], sequences: Iterable[Sequence[int]], tokenizer: Tokenizer | None) -> None:
        spaced = (spelled for text in texts for spelled in (text, " " + text.lstrip(" ")))
        self._texts = tuple(dict.fromkeys(spelled.encode() for spelled in spaced))
        self._sequences = tuple(dict.fromkeys(map(tuple, sequences)))
        self._tokenizer = tokenizer
        self._ids = {} if tokenizer is None or not self._texts else ids_by_bytes(tokenizer)
        self._always = frozenset(self._completed((*self._texts, *self._sequences)))
        self._starts: dict[int, list[bytes]] = {}  # by their first byte
        for text in self._texts:
            self._starts.setdefault(text[0], []).append(text)
        self._heads: dict[int, list[tuple[int, ...]]] = {}  # by their first token
        for sequence in self._sequences:
            self._heads.setdefault(sequence[0], []).append(sequence)
        self._open: list[list[bytes | tuple[int, ...]]] = [[]]  # after each token, the rest of each word that has begun

    def __bool__(self) -> bool:
        return bool(self._texts or self._sequences)

    def fresh(self) -> BadWords:
        """The same words, before any token."""
        copy = object.__new__(BadWords)
        copy.__dict__.update(self.__dict__)
        copy._open = [[]]
        return copy

    def copy(self) -> BadWords:
        """A copy after the same tokens."""
        copy = self.fresh()
        copy._open = list(self._open)
        return copy

    def forbidden(self) -> Set[int]:
        """The tokens that would complete a word."""
        return self._always | self._completed(self._open[-1]) if self._open[-1] else self._always

    def _completed(self, rests: Iterable[bytes | tuple[int, ...]]) -> set[int]:
        result: set[int] = set()
        for rest in rests:
            if isinstance(rest, bytes):
                result.update(self._ids.get(rest, ()))
            elif len(rest) == 1:
                result.add(rest[0])
        return result

    def push(self, token: int) -> None:
        """Add a token."""
        spelled = self._spelled(token) if self._texts else b""
        left: list[bytes | tuple[int, ...]] = []
        begun = (*self._starts.get(spelled[0], ()), *self._open[-1]) if spelled else self._open[-1]
        for rest in (*begun, *self._heads.get(token, ())):
            if isinstance(rest, bytes):
                if spelled and len(rest) > len(spelled) and rest.startswith(spelled):
                    left.append(rest[len(spelled) :])
            elif len(rest) > 1 and rest[0] == token:
                left.append(rest[1:])
        self._open.append(list(dict.fromkeys(left)))

    def drop(self, n: int) -> None:
        """Remove the last n tokens."""
        del self._open[len(self._open) - n :]

    def _spelled(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


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
    def is_slow(self) -> bool:
        return is_slow(self._other)

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """In a thread: it touches nothing but the grammar."""
        grammar: Any = self._other
        grammar.settle(is_wanted)

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
            for id in set(tokenizer.backend.get_vocab(with_added_tokens=True).values()) - tokenizer.special_ids:
                spelled = tokenizer.token_bytes(id)
                result[spelled] = (*result.get(spelled, ()), id)
            _ids_by_tokenizer[tokenizer] = result
        return _ids_by_tokenizer[tokenizer]


def longest_token(tokenizer: Tokenizer) -> int:
    """The length of the longest token in bytes."""
    return max(map(len, ids_by_bytes(tokenizer)), default=1)
