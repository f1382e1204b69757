"""Async logit masks: masks of compiled grammars, computed while the device computes the pass that they apply to.

A pass that takes a token which nobody has read yet cannot have its mask yet, because the token decides it. When the
token is known, the pass goes to the device, and a thread of ours advances the grammar and computes the mask, which is
needed only once the logits are there. The thread takes all waiting masks at once (`constraints/batched_masks.py`). Only
compiled grammars work like this, because their cost for each token is bounded (limits in `constraints/cache.py`); the
cost of a program's own constraint is not. A grammar that turns out slow counts as sparse, so that its masks are
computed between passes from then on, and no step waits for them. In run-ahead decoding one that must be compiled again
ends the run instead: the token drawn at its row is void.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache

import numpy as np

from headway.base.errors import Closed, HeadwayError
from headway.base.specs.masks import logit_mask
from headway.program.constraints.batched_masks import accept_all, internal_error, masks_of
from headway.program.constraints.budget import Postponed
from headway.program.constraints.constraint import GrammarMatcher

DENSE = 0.25  # mask density (share of the vocabulary allowed) below which forced tokens are likely to follow


class GrammarCursor:
    """Advances a grammar with the tokens of run-ahead decoding. The first token is the one that it starts from."""

    def __init__(self, first: GrammarMask, grammar: GrammarMatcher, ends: frozenset[int], vocab_size: int) -> None:
        self._grammar, self._ends, self._vocab = grammar, ends, vocab_size
        self.first, self._masks = first, deque([first])  # those that are not known to be done
        first.hurries = True
        self.tokens = 1  # tokens received; not the last of a run, after which nothing is drawn
        self._accepted = 0  # by masks that are done

    def advance(self, token: int) -> GrammarMask:
        """Start computing the mask after a token."""
        while self._masks and self._masks[0].done:  # a long run has many
            self._accepted += self._masks.popleft().accepted
        mask = GrammarMask(self._grammar, self._ends, self._vocab)
        mask.hurries = True
        self._masks.append(mask)
        self.tokens += 1
        mask.start((token,))
        return mask

    def cut(self, keep: int) -> None:
        """The run is over: roll the grammar back to where it was after `keep` tokens."""
        surplus = self._accepted + sum(mask.wait() for mask in self._masks) - keep
        if surplus > 0:
            self._grammar.rollback(surplus)


class GrammarMask:
    """The mask after the token that a pass takes. `accepted` once the grammar has accepted that token."""

    __slots__ = ("_ended", "_ends", "_result", "_sparse", "_vocab", "accepted", "done", "grammar", "hurries", "token")

    def __init__(self, grammar: GrammarMatcher, ends: frozenset[int], vocab_size: int) -> None:
        self.grammar, self._ends, self._vocab = grammar, ends, vocab_size
        self.token: int | None = None
        self._result: np.ndarray | HeadwayError | None = None
        self._ended = self._sparse = self.accepted = False
        self.hurries = False  # whether the run of its grammar may end before this mask
        self.done = False  # whether nobody needs to wait for it

    def start(self, tokens: Sequence[int]) -> None:
        """The token is known: queue the mask."""
        self.token = tokens[-1]
        _thread().put(self)

    def result(self) -> np.ndarray:
        """The mask [V]."""
        return logit_mask(self._vocab, self.words())

    def words(self) -> np.ndarray:
        """The mask as packed bits, [V / 32] words of 32."""
        self.wait()
        if self._result is None:
            raise Closed("the token before this one ended the text")
        if isinstance(self._result, HeadwayError):
            raise self._result
        return self._result

    @property
    def ended(self) -> bool:
        """Whether the grammar allows no more text."""
        self.wait()
        return self._ended

    @property
    def sparse(self) -> bool:
        """Whether the mask's density is below DENSE, so that forced tokens are likely to follow, or it came slowly."""
        self.wait()
        return self._sparse

    def wait(self) -> bool:
        """Wait for the thread, if it was started; whether the grammar has accepted the token."""
        if self.token is not None and not self.done:
            with _computed:
                _computed.wait_for(lambda: self.done)
        return self.accepted

    # -- in the thread

    @property
    def ends_text(self) -> bool:
        """Whether the token ends the text, so that there is nothing to compute."""
        return self.token in self._ends

    def set_accepted(self, error: HeadwayError | None) -> None:
        """The grammar has accepted the token, or `error` says why not."""
        self.accepted, self._result = error is None, error

    def set_mask(self, mask: np.ndarray | HeadwayError) -> None:
        """The mask after the token, or why there is none."""
        if isinstance(mask, Postponed) and self.hurries:
            self._result = self.grammar.layout.only_first()  # the token drawn under it is void
            self._ended = self._sparse = True
            return
        self._result = mask
        if not isinstance(mask, HeadwayError):
            self._sparse = self.grammar.mask_density < DENSE or self.grammar.is_slow
            self._ended = self._sparse and self.grammar.finished


_computed = threading.Condition()  # one for all masks: they are computed together, and all waiters look then


def compute(masks: Sequence[GrammarMask]) -> None:
    """Advance the grammar of each mask, all of them different, and compute the masks."""
    try:
        going = [mask for mask in masks if not mask.ends_text]
        for mask in going:
            mask.grammar.hurries = mask.hurries
        tokens = [(mask.grammar, mask.token) for mask in going if mask.token is not None]
        for mask, error in zip(going, accept_all(tokens), strict=True):
            mask.set_accepted(error)
        accepted = [mask for mask in going if mask.accepted]
        for mask, result in zip(accepted, masks_of([mask.grammar for mask in accepted]), strict=True):
            mask.set_mask(result)
    except BaseException as error:  # a bug of ours: nobody may be left waiting
        for mask in masks:
            mask.set_mask(internal_error(error))
    finally:
        for mask in masks:
            mask.grammar.hurries, mask.done = False, True
        with _computed:
            _computed.notify_all()


def one_per_grammar(masks: Sequence[GrammarMask]) -> tuple[list[GrammarMask], list[GrammarMask]]:
    """The first mask of each grammar, and the others, both in order."""
    first: dict[int, GrammarMask] = {}
    others = [mask for mask in masks if first.setdefault(id(mask.grammar), mask) is not mask]
    return list(first.values()), others


@cache
def _thread() -> queue.SimpleQueue[GrammarMask]:
    """The queue of the thread that computes masks; the thread starts when the first mask is needed."""
    waiting: queue.SimpleQueue[GrammarMask] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(waiting,), name="headway-masks", daemon=True).start()
    return waiting


def _work(waiting: queue.SimpleQueue[GrammarMask]) -> None:
    rest: list[GrammarMask] = []
    while True:
        rest = _compute_waiting(rest, waiting)


def _compute_waiting(rest: list[GrammarMask], waiting: queue.SimpleQueue[GrammarMask]) -> list[GrammarMask]:
    """Compute what waits; returns what is left. A function, so that no mask is kept alive while the thread waits."""
    masks = rest or [waiting.get()]
    masks += [waiting.get() for _ in range(waiting.qsize())]
    now, rest = one_per_grammar(masks)
    compute(now)
    return rest
