"""A constraint for a text inside a JSON string, whose grammar knows nothing of the quotation mark that ends it."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.base.errors import Unsupported
from headway.program.constraints.constraint import Constraint
from headway.server.api.token_bounds import packed_mask
from headway.text.tokenizer import Tokenizer


def quote_token(tokenizer: Tokenizer) -> int:
    """The token of a quotation mark inside a text."""
    token = tokenizer.encode('x"', special=False)[-1]
    if tokenizer.token_bytes(token) != b'"':
        raise Unsupported("this model's tokenizer has no quotation mark; use a custom tool without a grammar")
    return token


class UntilQuote:
    """Allows what `format` allows and, where that may end, a quotation mark, which ends it."""

    def __init__(self, vocab: int, format: Constraint, quote: int) -> None:
        self._format: Any = format
        self._vocab, self._quote = vocab, quote
        self._quotes: list[bool] = []  # of each token, whether it is the mark at the end

    @property
    def is_closed(self) -> bool:
        """Whether the text ended with the quotation mark."""
        return bool(self._quotes) and self._quotes[-1]

    def mask(self) -> np.ndarray | None:
        bits = self._format.mask()
        if bits is None or not self._format.may_end:
            return bits
        return bits | packed_mask([self._quote], self._vocab)

    def accept(self, token: int) -> None:
        ends = token == self._quote and not self.is_closed and bool(self._format.may_end)
        if not ends:
            self._format.accept(token)
        self._quotes.append(ends)

    def rollback(self, n: int) -> None:
        undone = self._quotes[len(self._quotes) - n :]
        del self._quotes[len(self._quotes) - n :]
        if count := undone.count(False):
            self._format.rollback(count)

    def copy(self) -> UntilQuote:
        twin = UntilQuote(self._vocab, self._format.copy(), self._quote)
        twin._quotes = list(self._quotes)
        return twin

    @property
    def wrapped(self) -> Constraint:
        return self._format

    @property
    def may_end(self) -> bool:
        return self.is_closed or bool(self._format.may_end)

    @property
    def finished(self) -> bool:
        return self.is_closed or bool(self._format.finished)
