"""Masks of compiled grammars that are computed while the device computes the very pass they bind.

A pass that takes a token nobody has read yet cannot have its mask: the token decides it. When the token is known, the
pass goes to the device, and a thread of ours moves the grammar on and computes the mask, which is needed only when the
logits are there. Only compiled grammars are followed so, because what they cost at a token is bounded (LIMITS in
headway.program.constraints); the time of a program's own constraint is that program's.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache

import numpy as np

from headway.base.errors import Closed, HeadwayError
from headway.base.masks import logit_mask
from headway.program.constraints import Matched

OPEN = 0.25  # the share of the vocabulary below which tokens without a choice are near


class GrammarFollower:
    """Moves a grammar on with a streak's tokens. The first is the one that the streak is fed with."""

    def __init__(self, first: LaterMask, grammar: Matched, ends: frozenset[int], vocab_size: int) -> None:
        self._grammar, self._ends, self._vocab = grammar, ends, vocab_size
        self.first, self._masks = first, deque([first])  # those that are not known to be done
        self.tokens = 1  # that it was given; not the last of a streak, behind which nothing is drawn
        self._accepted = 0  # by masks that are done

    def follow(self, token: int) -> LaterMask:
        """The mask behind a token, set going."""
        while self._masks and self._masks[0].done:  # a long streak has many
            self._accepted += self._masks.popleft().accepted
        mask = LaterMask(self._grammar, self._ends, self._vocab)
        self._masks.append(mask)
        self.tokens += 1
        mask.start((token,))
        return mask

    def cut(self, keep: int) -> None:
        """The streak is over: the grammar goes back to where it was behind so many tokens."""
        surplus = self._accepted + sum(mask.wait() for mask in self._masks) - keep
        if surplus > 0:
            self._grammar.rollback(surplus)


class LaterMask:
    """The mask behind the token that a pass is fed with. `accepted` once the grammar has taken the token."""

    def __init__(self, grammar: Matched, ends: frozenset[int], vocab_size: int) -> None:
        self._grammar, self._ends, self._vocab = grammar, ends, vocab_size
        self._token: int | None = None
        self._done = threading.Event()
        self._found: np.ndarray | HeadwayError = Closed("the token before this one ended the text")
        self._ended = self._narrow = False
        self.accepted = False

    def start(self, tokens: Sequence[int]) -> None:
        """The token is known: have the mask computed."""
        self._token = tokens[-1]
        _thread().put(self)

    def result(self) -> np.ndarray:
        """The mask [V]."""
        return logit_mask(self._vocab, self.words())

    def words(self) -> np.ndarray:
        """The mask as bits, [V / 32] of 32 each."""
        self.wait()
        if isinstance(self._found, HeadwayError):
            raise self._found
        return self._found

    @property
    def done(self) -> bool:
        """Whether nobody need wait for it."""
        return self._done.is_set()

    @property
    def ended(self) -> bool:
        """The grammar has nothing left."""
        self.wait()
        return self._ended

    @property
    def narrow(self) -> bool:
        """The grammar leaves little open, so that tokens without a choice are near."""
        self.wait()
        return self._narrow

    def wait(self) -> bool:
        """Wait for the thread, if it was started; whether the grammar has taken the token."""
        if self._token is not None:
            self._done.wait()
        return self.accepted

    def compute(self) -> None:
        """In the thread: move the grammar on, unless the token ends the text."""
        assert self._token is not None
        try:
            if self._token not in self._ends:
                self._grammar.accept(self._token)
                self.accepted = True
                self._narrow = self._grammar.breadth < OPEN
                self._ended = self._narrow and self._grammar.finished
                self._found = self._grammar.mask()
        except HeadwayError as error:
            self._found = error
        except BaseException as error:  # a fault of ours: nobody may be left waiting
            self._found = Closed(f"the mask was not computed after an internal error: {error!r}")
        finally:
            self._done.set()


@cache
def _thread() -> queue.SimpleQueue[LaterMask]:
    """The queue of the thread that computes masks; it is started when the first is needed."""
    todo: queue.SimpleQueue[LaterMask] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(todo,), name="headway-masks", daemon=True).start()
    return todo


def _work(todo: queue.SimpleQueue[LaterMask]) -> None:
    while True:
        todo.get().compute()
