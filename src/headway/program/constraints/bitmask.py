"""Converts the grammar library's masks to the model's: packed bits of the tokens allowed next, several rows at once.

The library's vocabulary is the tokenizer's tokens and one end token of its own after them; the model's may be wider and
has its own end tokens. Bit arithmetic only: it knows neither grammars nor texts.
"""

from __future__ import annotations

import numpy as np

from headway.base.dataclass import dataclass


@dataclass(frozen=True)
class MaskLayout:
    """How masks are laid out: the tokens that the library knows, the model's V, and its end tokens."""

    known: int
    vocab: int
    ends: tuple[int, ...]

    def buffer(self, rows: int) -> np.ndarray:
        """Where the library writes masks, [R, its words]; it overwrites all of it."""
        return np.empty((rows, padded(self.known + 1) // 32), np.uint32)

    def without_ends(self, written: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """The masks that the library wrote, without any end token, [R, V / 32], and how many tokens each allows."""
        written[:, self.known // 32] &= np.uint32((1 << self.known % 32) - 1)  # the library's own end token, and
        written[:, self.known // 32 + 1 :] = 0  # its padding
        for id in self.ends:
            if id < self.known:
                written[:, id // 32] &= ~np.uint32(1 << id % 32)
        counts = np.bitwise_count(written.view(np.uint64)).sum(axis=1, dtype=np.uint32).tolist()
        if (width := _words(self.vocab)) <= written.shape[1]:
            return written[:, :width], counts
        rows = np.zeros((len(written), width), np.uint32)
        rows[:, : written.shape[1]] = written
        return rows, counts

    def allow_ends(self, masks: np.ndarray, rows: list[int]) -> None:
        """Allow the end tokens in these rows of masks."""
        for id in self.ends if rows else ():
            masks[rows, id // 32] |= np.uint32(1 << id % 32)

    def only_ends(self) -> np.ndarray:
        """The mask [V / 32] after an end token."""
        mask = np.zeros((1, _words(self.vocab)), np.uint32)
        self.allow_ends(mask, [0])
        return mask[0]

    def only_first(self) -> np.ndarray:
        """A mask [V / 32] that allows token 0 alone, where any one will do."""
        mask = np.zeros(_words(self.vocab), np.uint32)
        mask[0] = 1
        return mask


def padded(count: int) -> int:
    """The size of the library's vocabulary for `count` tokens: its masks are counted 64 bits at a time."""
    return -(-count // 64) * 64


def _words(count: int) -> int:
    return -(-count // 32)
