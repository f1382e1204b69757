"""Masks of compiled grammars that are computed while the device computes the very pass they bind.

A pass that takes a token nobody has read yet cannot have its mask: the token decides it. When the token is known, the
pass goes to the device, and a thread of ours moves the grammar on and computes the mask, which is needed only when the
logits are there. The thread takes all that wait at once (headway.program.constraints.batch). Only compiled grammars are followed
so, because what they cost at a token is bounded (LIMITS in headway.program.constraints.cache); the time of a program's own
constraint is that program's.
"""  # noqa: E501

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache

import numpy as np

from headway.base.errors import Closed, HeadwayError
from headway.base.masks import logit_mask
from headway.program.constraints.batch import accept_all, fault, masks_of
from headway.program.constraints.constraint import Matched

OPEN = 0.25  # the share of the vocabulary below which tokens without a choice are near


class GrammarFollower:
    """Moves a grammar on with a streak's tokens. The first is the one that the streak is fed with."""

    def __init__(self, first: LaterMask, grammar: Matched, ends: frozenset[int], vocab_size: int) -> None:
        self._grammar, self._ends, self._vocab = grammar, ends, vocab_size
        self.first, self._masks = first, deque([first])  # those that are not known to be done
        self.tokens = 1  # that it was given; not the last of a streak, behind which nothing is drawn
        self._accepted = 0  # by masks that are done

    def advance(self, token: int) -> LaterMask:
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

    __slots__ = ("_ended", "_ends", "_found", "_narrow", "_vocab", "accepted", "done", "grammar", "token")

    def __init__(self, grammar: Matched, ends: frozenset[int], vocab_size: int) -> None:
        self.grammar, self._ends, self._vocab = grammar, ends, vocab_size
        self.token: int | None = None
        self._found: np.ndarray | HeadwayError | None = None
        self._ended = self._narrow = self.accepted = False
        self.done = False  # whether nobody need wait for it

    def start(self, tokens: Sequence[int]) -> None:
        """The token is known: have the mask computed."""
        self.token = tokens[-1]
        _thread().put(self)

    def result(self) -> np.ndarray:
        """The mask [V]."""
        return logit_mask(self._vocab, self.words())

    def words(self) -> np.ndarray:
        """The mask as bits, [V / 32] of 32 each."""
        self.wait()
        if self._found is None:
            raise Closed("the token before this one ended the text")
        if isinstance(self._found, HeadwayError):
            raise self._found
        return self._found

    @property
    def ended(self) -> bool:
        """The grammar has nothing left."""
        self.wait()
        return self._ended

    @property
    def sparse(self) -> bool:
        """The grammar leaves little open, so that tokens without a choice are near."""
        self.wait()
        return self._narrow

    def wait(self) -> bool:
        """Wait for the thread, if it was started; whether the grammar has taken the token."""
        if self.token is not None and not self.done:
            with _computed:
                _computed.wait_for(lambda: self.done)
        return self.accepted

    # -- in the thread

    @property
    def ends_text(self) -> bool:
        """The token ends the text: there is nothing to compute."""
        return self.token in self._ends

    def take(self, error: HeadwayError | None) -> None:
        """The grammar has taken the token, or why it has not."""
        self.accepted, self._found = error is None, error

    def find(self, mask: np.ndarray | HeadwayError) -> None:
        """The mask behind the token, or why there is none."""
        self._found = mask
        if not isinstance(mask, HeadwayError):
            self._narrow = self.grammar.breadth < OPEN
            self._ended = self._narrow and self.grammar.finished


_computed = threading.Condition()  # one for all masks: they are computed together, and then all who wait look


def compute(masks: Sequence[LaterMask]) -> None:
    """Move a grammar each on, and give each its mask; they are different grammars."""
    try:
        going = [mask for mask in masks if not mask.ends_text]
        tokens = [(mask.grammar, mask.token) for mask in going if mask.token is not None]
        for mask, error in zip(going, accept_all(tokens), strict=True):
            mask.take(error)
        taken = [mask for mask in going if mask.accepted]
        for mask, found in zip(taken, masks_of([mask.grammar for mask in taken]), strict=True):
            mask.find(found)
    except BaseException as error:  # a fault of ours: nobody may be left waiting
        for mask in masks:
            mask.find(fault(error))
    finally:
        for mask in masks:
            mask.done = True
        with _computed:
            _computed.notify_all()


def firsts(masks: Sequence[LaterMask]) -> tuple[list[LaterMask], list[LaterMask]]:
    """The first of each grammar, and the others, in their order."""
    found: dict[int, LaterMask] = {}
    others = [mask for mask in masks if found.setdefault(id(mask.grammar), mask) is not mask]
    return list(found.values()), others


@cache
def _thread() -> queue.SimpleQueue[LaterMask]:
    """The queue of the thread that computes masks; it is started when the first is needed."""
    todo: queue.SimpleQueue[LaterMask] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(todo,), name="headway-masks", daemon=True).start()
    return todo


def _work(todo: queue.SimpleQueue[LaterMask]) -> None:
    rest: list[LaterMask] = []
    while True:
        rest = _turn(rest, todo)


def _turn(rest: list[LaterMask], todo: queue.SimpleQueue[LaterMask]) -> list[LaterMask]:
    """Compute what waits; what is left is for the next turn. A function, so that nothing is kept while it waits."""
    waiting = rest or [todo.get()]
    waiting += [todo.get() for _ in range(todo.qsize())]
    now, rest = firsts(waiting)
    compute(now)
    return rest
