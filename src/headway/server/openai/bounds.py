"""Tokens that a request allows or forbids, as a constraint: a list of allowed ids, and words that must not come.

A word is a sequence of tokens; its last one is forbidden where the others have just been generated. A text is forbidden
as the tokenizer writes it at the beginning of a line and behind a space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from headway.base.errors import InvalidInput
from headway.program.constraints import Constraint


class Bounded:
    """What `other` allows (everything, when there is none), of the allowed ids, and without forbidden words.

    It forces no tokens: each one is drawn by a pass of its own and can be ranked there.
    """

    def __init__(
        self,
        vocab: int,
        allowed: Iterable[int] | None = None,
        words: Iterable[Sequence[int]] = (),
        other: Constraint | None = None,
    ) -> None:
        self._vocab = vocab
        self._allowed = None if allowed is None else _packed(allowed, vocab)
        self._ends: dict[tuple[int, ...], set[int]] = {}  # the tokens before the last → those
        for word in words:
            self._ends.setdefault(tuple(word[:-1]), set()).add(word[-1])
        self._lengths = sorted({len(head) for head in self._ends})
        self._other = other
        self._said: list[int] = []

    def mask(self) -> np.ndarray | None:
        words = None if self._other is None else self._other.mask()
        if self._allowed is not None:
            words = self._allowed if words is None else words & self._allowed
        if forbidden := self._forbidden():
            all_but = ~_packed(forbidden, self._vocab)
            words = all_but & _packed(range(self._vocab), self._vocab) if words is None else words & all_but
        if words is not None and not words.any():
            raise InvalidInput(
                f"nothing may come after {len(self._said)} tokens: allowed_token_ids, bad_words and the form that was "
                "asked for leave no token; relax one of them"
            )
        return words

    def accept(self, token: int) -> None:
        if token in self._forbidden():
            raise InvalidInput(f"token {token} would complete one of bad_words")
        if self._allowed is not None and not self._allowed[token // 32] >> np.uint32(token % 32) & 1:
            raise InvalidInput(f"token {token} is not one of allowed_token_ids")
        if self._other is not None:
            self._other.accept(token)
        self._said.append(token)

    def rollback(self, n: int) -> None:
        if self._other is not None:
            self._other.rollback(n)
        del self._said[len(self._said) - n :]

    def copy(self) -> Bounded:
        twin = object.__new__(Bounded)
        twin.__dict__.update(self.__dict__)
        other: Any = self._other
        twin._other, twin._said = None if other is None else other.copy(), list(self._said)
        return twin

    @property
    def may_end(self) -> bool:
        return bool(getattr(self._other, "may_end", True))

    @property
    def finished(self) -> bool:
        return bool(getattr(self._other, "finished", False))

    def _forbidden(self) -> set[int]:
        found: set[int] = set()
        for length in self._lengths:
            if length <= len(self._said):
                found |= self._ends.get(tuple(self._said[len(self._said) - length :]), set())
        return found


def _packed(ids: Iterable[int], vocab: int) -> np.ndarray:
    """A packed mask that allows these ids: uint32 words, bit i % 32 of word i // 32."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.fromiter(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
