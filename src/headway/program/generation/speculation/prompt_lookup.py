"""Prompt lookup: what followed the last few tokens when they came before, in the prompt or in the text so far.

    index   (a, b, c) → where the token after their latest occurrence stands       for 2, 3 and 4 tokens
    draft   the longest n-gram that ends the text and was seen before → the tokens that followed it then

Costs a few dictionary entries a token and no pass. Good for text that repeats its prompt: edits, quotes, code, tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput
from headway.program.generation.speculation.drafter import MAX_DRAFT, Draft

WINDOW = 1 << 16  # tokens that the index may hold
LONG = 8  # matching tokens from which on a match is as good as any


class PromptLookup:
    """Drafts by n-grams of `min_ngram` to `max_ngram` tokens, `max_tokens` at a time at most.

    `window` bounds its memory: of a longer sequence at least the last half of it is searched. With `adaptive=False`
    every draft is verified, whether drafting pays or not.
    """

    def __init__(
        self,
        *,
        max_tokens: int = 24,
        min_ngram: int = 2,
        max_ngram: int = 4,
        window: int = WINDOW,
        adaptive: bool = True,
    ) -> None:
        self._most = check_integer(max_tokens, "max_tokens", 1, MAX_DRAFT)
        self._least_n = check_integer(min_ngram, "min_ngram", 1, 16)
        self._most_n = check_integer(max_ngram, "max_ngram", 1, 16)
        if self._least_n > self._most_n:
            raise InvalidInput(f"min_ngram is {min_ngram} and max_ngram is {max_ngram}; it must not be larger")
        self.adaptive = adaptive
        self._window = check_integer(window, "window", 2 * self._most_n + 2)
        self._sizes = range(self._most_n, self._least_n - 1, -1)
        self._tokens: list[int] = []
        self._index: dict[tuple[int, ...], int] = {}  # n tokens → where the one after them stands, if one does

    def __repr__(self) -> str:
        return f"PromptLookup(max_tokens={self._most}, min_ngram={self._least_n}, max_ngram={self._most_n})"

    def copy(self) -> PromptLookup:
        """One that has seen nothing yet."""
        return PromptLookup(
            max_tokens=self._most,
            min_ngram=self._least_n,
            max_ngram=self._most_n,
            window=self._window,
            adaptive=self.adaptive,
        )

    def accept(self, tokens: Sequence[int]) -> None:
        """Index what was added."""
        mine, index = self._tokens, self._index
        for token in tokens[-self._window :]:
            end = len(mine)
            for n in self._sizes:  # now that a token follows them, the last n can be found
                if n <= end:
                    index[tuple(mine[end - n :])] = end
            mine.append(token)
        if len(mine) > self._window:
            self._tokens, self._index = [], {}
            self.accept(mine[len(mine) - self._window // 2 :])

    def draft(self, tokens: Sequence[int], limit: int) -> Draft:
        """What followed the longest n-gram that ends the text."""
        mine = self._tokens
        for n in self._sizes:
            at = self._index.get(tuple(mine[len(mine) - n :])) if n <= len(mine) else None
            if at is not None:
                matching = self._matching(at, n)
                following = self._following(at, min(limit, self._most))
                return Draft(following, kind=matching, chance=matching / (matching + 4))
        return Draft(())

    def _following(self, at: int, count: int) -> tuple[int, ...]:
        """The tokens from `at` on; where they reach the end of the text, which they repeat, they go round."""
        tokens = self._tokens[at : at + count]
        period = len(self._tokens) - at
        while len(tokens) < count:
            tokens.append(tokens[len(tokens) - period])
        return tuple(tokens)

    def _matching(self, at: int, n: int) -> int:
        """How many tokens before `at` are those at the end, at most LONG; the last n are."""
        mine, end = self._tokens, len(self._tokens)
        while n < LONG and n < at and mine[at - n - 1] == mine[end - n - 1]:
            n += 1
        return n
