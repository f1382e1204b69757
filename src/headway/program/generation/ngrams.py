"""`no_repeat_ngram_size`: no run of n tokens comes twice, as in `transformers`.

`NoRepeat` is a constraint over all tokens of a context, the prompt included, combined with another constraint that a
program may give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, Unsupported
from headway.program.constraints.constraint import Constraint
from headway.program.constraints.grammar import Grammar

if TYPE_CHECKING:
    from headway.program.context import Context


def banned_by_ngrams(tokens: Sequence[int], n: int) -> set[int]:
    """The tokens that would complete a run of n tokens that `tokens` has already; none for n = 0."""
    n = check_integer(n, "n")
    if n == 0 or len(tokens) < n:
        return set()
    last = tuple(tokens[len(tokens) - n + 1 :])
    runs = (tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1))
    return {run[-1] for run in runs if run[:-1] == last}


def copied(constraint: Any) -> Any:
    """An independent copy of a constraint; a `Grammar` is a value and its own copy."""
    if constraint is None or isinstance(constraint, Grammar):
        return constraint
    if not hasattr(constraint, "copy"):
        raise Unsupported(f"{type(constraint).__name__} has no copy(), so two texts cannot follow it; give it one")
    return constraint.copy()


class NoRepeat:
    """Allows the tokens that repeat no run of n tokens of its context and that `other` allows.

    It reads the context, not only the tokens it accepted: those that a program writes between two steps count too.
    """

    in_program = True

    def __init__(self, n: int, context: Context, other: Constraint | None = None) -> None:
        self._n, self.context, self.other = check_integer(n, "no_repeat_ngram_size", low=1), context, other
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], Counter[int]] = {}  # n - 1 tokens → those that came next
        self.stale = True  # the context may have changed
        self._accepted = 0  # tokens since it was read

    def mask(self) -> np.ndarray | None:
        self._sync()
        allowed = None if self.other is None else self.other.mask()
        if not (banned := self._banned()):
            return allowed
        words = _all_but(banned, self.context.engine.vocab_size)
        both = words if allowed is None else words & allowed
        if not both.any():
            where = "" if allowed is None else " that the constraint allows"
            raise InvalidInput(f"no_repeat_ngram_size={self._n} forbids every token{where} here; give a larger one")
        return both

    def accept(self, token: int) -> None:
        if self.stale:
            self._sync()
        if token in self._banned():
            raise InvalidInput(f"token {token} would repeat a run of {self._n} tokens (no_repeat_ngram_size)")
        if self.other is not None:
            self.other.accept(token)
        self._push(token)
        self._accepted += 1

    def rollback(self, n: int) -> None:
        if self.other is not None:
            self.other.rollback(n)
        if self.stale or n > self._accepted:
            self.stale = True
        else:
            self._drop(n)
            self._accepted -= n

    def copy(self) -> NoRepeat:
        return NoRepeat(self._n, self.context, copied(self.other))

    def forced(self) -> list[int]:
        """The other constraint's forced tokens, until one would repeat a run."""
        self._sync()
        tokens, kept = getattr(self.other, "forced", list)(), 0
        for token in tokens:
            if token in self._banned():
                break
            self._push(token)
            kept += 1
        self._drop(kept)
        return tokens[:kept]

    @property
    def may_end(self) -> bool:
        return getattr(self.other, "may_end", True)

    @property
    def finished(self) -> bool:
        return getattr(self.other, "finished", False)

    @property
    def wrapped(self) -> Constraint | None:
        return self.other

    def _sync(self) -> None:
        """Read the context's tokens, unless it has all but those accepted last: drafts."""
        tokens, own = self.context.tokens, tuple(self._tokens)
        if not self.stale and tokens == own[: len(own) - self._accepted]:
            return
        self.stale, self._accepted = False, 0
        if tokens[: len(own)] != own:
            own = own[: next(i for i, token in enumerate(own) if tokens[i : i + 1] != (token,))]
            self._drop(len(self._tokens) - len(own))
        for token in tokens[len(own) :]:
            self._push(token)

    def _banned(self) -> Counter[int]:
        return self._next.get(self._last(), Counter())

    def _last(self) -> tuple[int, ...]:
        return tuple(self._tokens[max(0, len(self._tokens) - self._n + 1) :])

    def _push(self, token: int) -> None:
        if len(self._tokens) >= self._n - 1:
            self._next.setdefault(self._last(), Counter())[token] += 1
        self._tokens.append(token)

    def _drop(self, n: int) -> None:
        for _ in range(n):
            token = self._tokens.pop()
            if len(self._tokens) >= self._n - 1:
                counts = self._next[self._last()]
                counts[token] -= 1
                if not counts[token]:
                    del counts[token]


def _all_but(banned: Iterable[int], vocab: int) -> np.ndarray:
    """A packed mask of all tokens but these."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[:vocab] = 1
    bits[sorted(banned)] = 0
    return np.packbits(bits, bitorder="little").view(np.uint32)
