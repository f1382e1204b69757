"""From the compiler's masks to the model's: bits of what may come next, several rows at once.

The compiler knows the tokenizer's tokens and an end token of its own behind them; the model has a width and end tokens
that are none of the compiler's business. Numbers only: it knows neither grammars nor texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MaskWords:
    """How masks are laid out: the tokens that the compiler knows, the model's V, and its end tokens."""

    known: int
    vocab: int
    ends: tuple[int, ...]

    def room(self, rows: int) -> np.ndarray:
        """Where the compiler writes masks, [R, its words]; it writes all of it."""
        return np.empty((rows, padded(self.known + 1) // 32), np.uint32)

    def text(self, found: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """The masks that the compiler wrote without any end token, [R, V / 32], and how many tokens each allows."""
        found[:, self.known // 32] &= np.uint32((1 << self.known % 32) - 1)  # the compiler's own end token, and
        found[:, self.known // 32 + 1 :] = 0  # what only fills its vocabulary up
        for id in self.ends:
            if id < self.known:
                found[:, id // 32] &= ~np.uint32(1 << id % 32)
        counts = np.bitwise_count(found.view(np.uint64)).sum(axis=1, dtype=np.uint32).tolist()
        if (width := _words(self.vocab)) <= found.shape[1]:
            return found[:, :width], counts
        rows = np.zeros((len(found), width), np.uint32)
        rows[:, : found.shape[1]] = found
        return rows, counts

    def allow_ends(self, masks: np.ndarray, rows: list[int]) -> None:
        """Let these rows of masks end."""
        for id in self.ends if rows else ():
            masks[rows, id // 32] |= np.uint32(1 << id % 32)

    def only_ends(self) -> np.ndarray:
        """The mask [V / 32] behind an end."""
        mask = np.zeros((1, _words(self.vocab)), np.uint32)
        self.allow_ends(mask, [0])
        return mask[0]


def padded(count: int) -> int:
    """The size of the compiler's vocabulary for so many tokens: its masks are counted by 64 bits at a time."""
    return -(-count // 64) * 64


def _words(count: int) -> int:
    return -(-count // 32)
