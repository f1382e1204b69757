"""Async logit masks: masks of compiled grammars, computed while the device computes the pass that they apply to.

A pass that takes a token which nobody has read yet cannot have its mask yet, because the token decides it. When the
token is known, the pass goes to the device, and a thread of ours advances the grammar and computes the mask, which is
needed only once the logits are there. The thread takes all waiting masks at once (`constraints/batched_masks.py`). The
cost of a compiled grammar is bounded for each token (limits in `constraints/cache.py`). One that turns out slow counts
as sparse, so that its masks are computed between passes from then on, and no step waits for them. In run-ahead decoding
one that must be compiled again ends the run instead: the token drawn at its row is void.

A program's own constraint (`ProgramMask`) is followed in another thread. What it costs is not bounded, so a step waits
for it for PATIENCE at most. Whatever keeps a mask from being there then (an error, a forced token, a look at a context)
ends the run in the same way, and the program's own thread goes on from there, pass by pass, with the same calls.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextvars import Context, copy_context
from functools import cache

import numpy as np

from headway.base.errors import Closed, HeadwayError
from headway.base.specs.masks import logit_mask, packed_logit_mask
from headway.program.constraints.batched_masks import accept_all, internal_error, masks_of
from headway.program.constraints.budget import Postponed, TokenTime
from headway.program.constraints.constraint import Constraint, GrammarMatcher
from headway.runtime.worker.bookkeeping_lock import never_wait

DENSE = 0.25  # mask density (share of the vocabulary allowed) below which forced tokens are likely to follow
STALL = 0.1  # seconds of a call to a program's own constraint, which may wait for others: it is not followed further
PATIENCE = 0.02  # seconds from a token to the mask after it, for which a step waits for a program's own constraint


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

    def has_accepted(self, taken: int) -> bool:
        """Whether the grammar has accepted token number `taken` of the run. It was drawn under the grammar's mask."""
        return self.tokens > taken

    def cut(self, keep: int) -> None:
        """The run is over: roll the grammar back to where it was after `keep` tokens."""
        surplus = self._accepted + sum(mask.wait() for mask in self._masks) - keep
        if surplus > 0:
            self._grammar.rollback(surplus)

    @property
    def is_broken(self) -> bool:
        """Whether the run ended for something that would end the next one as soon."""
        return False


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


class ProgramCursor:
    """Advances a program's own constraint with the tokens of run-ahead decoding, as `GrammarCursor` does a grammar."""

    def __init__(self, first: ProgramMask) -> None:
        self.first, self._last, self._masks = first, first, deque([first])  # those of tokens that were not taken
        self._taken = 0  # the number of the first of them
        self._accepted = 0  # tokens before it

    def advance(self, token: int) -> ProgramMask:
        """Start computing the mask after a token."""
        self._last = self.first.another()
        self._masks.append(self._last)
        self._last.start((token,))
        return self._last

    def has_accepted(self, taken: int) -> bool:
        """Whether the constraint has accepted token number `taken` of the run, which the program takes now."""
        while self._masks and self._taken < taken:
            self._accepted += self._masks.popleft().wait()
            self._taken += 1
        return bool(self._masks) and self._masks[0].wait()

    def cut(self, keep: int) -> None:
        """The run is over: roll the constraint back to where it was after `keep` tokens."""
        surplus = self._accepted + sum(mask.wait() for mask in self._masks) - keep
        if surplus > 0:
            self.first.constraint.rollback(surplus)

    @property
    def is_broken(self) -> bool:
        """Whether the run ended for something that would end the next one as soon."""
        return self._last.token is not None and self._last.sparse


class ProgramMask:
    """The mask after the token that a pass takes, of a program's own constraint; `accepted` once it has that token.

    It raises nothing: where the constraint does, the run is over, and the program's thread will hear of it.
    """

    def __init__(
        self,
        constraint: Constraint,
        ends: frozenset[int],
        vocab_size: int,
        pace: TokenTime,
        variables: Context | None = None,
    ) -> None:
        self.constraint, self._ends, self._vocab, self.pace = constraint, ends, vocab_size, pace
        self._variables = copy_context() if variables is None else variables  # of the program
        self.token: int | None = None
        self._words: np.ndarray | None = None
        self._deadline = 0.0
        self._begun = self._is_late = self.accepted = self.done = False

    def another(self) -> ProgramMask:
        """One for the token that comes next."""
        return ProgramMask(self.constraint, self._ends, self._vocab, self.pace, self._variables)

    def start(self, tokens: Sequence[int]) -> None:
        """The token is known: queue the mask."""
        self._deadline, self.token = time.monotonic() + PATIENCE, tokens[-1]
        _program_thread().put(self)

    def result(self) -> np.ndarray:
        """The mask [V]."""
        return logit_mask(self._vocab, self.words())

    def words(self) -> np.ndarray:
        """The mask as packed bits, [V / 32] words of 32; any will do where the token drawn under it is void."""
        if not self.ended:
            assert self._words is not None
            return self._words
        words = np.zeros(-(-self._vocab // 32), np.uint32)
        words[0] = 1
        return words

    @property
    def ended(self) -> bool:
        """Whether there is no mask, or none in time."""
        self._wait_a_while()
        return self._words is None or self._is_late

    @property
    def sparse(self) -> bool:
        """Whether its program goes on by other means after the next token."""
        return self.ended or self.pace.is_slow

    def wait(self) -> bool:
        """Wait for the thread, if it was started; whether the constraint has accepted the token."""
        if self.token is not None:
            self._wait_a_while()
            if not self.done:
                with _computed:
                    _computed.wait_for(lambda: self.done)
        return self.accepted

    def _wait_a_while(self) -> None:
        """Wait until the mask is there or late; one that was not begun by then never is."""
        if self.done or self._is_late:
            return
        with _computed:
            _computed.wait_for(lambda: self.done, max(0.0, self._deadline - time.monotonic()))
            if not self.done:
                self._is_late, self.done = True, not self._begun

    # -- in the thread

    def begin(self) -> bool:
        """Whether it is still wanted."""
        with _computed:
            self._begun = not self.done
            return self._begun

    def compute(self) -> None:
        """Give the constraint its token, and ask it what a pass needs to know."""
        began, started, _own_calls.looked = time.thread_time(), time.monotonic(), False
        try:
            self._variables.run(self._follow)
        except BaseException:  # the program's thread makes the same call, which raises there
            self._words = None
        if _own_calls.looked:
            self._words = None
        self.pace.next_token()
        self.pace.add(time.thread_time() - began)
        if time.monotonic() - started > STALL:
            self.pace.suspect()

    def _follow(self) -> None:
        constraint = self.constraint
        if self.token is None or self.token in self._ends:
            return
        constraint.accept(self.token)
        self.accepted = True
        if getattr(constraint, "finished", False) or getattr(constraint, "forced", list)():
            return
        bits = constraint.mask()
        self._words = _everything(self._vocab) if bits is None else packed_logit_mask(self._vocab, bits)


@cache
def _everything(vocab: int) -> np.ndarray:
    return packed_logit_mask(vocab, np.ones(vocab, np.bool_))


class LooksAtContext(HeadwayError):
    """A program's own constraint has looked at a context in a thread of ours; it will see it in its program's."""


_own_calls = threading.local()  # `looked` is there in the thread that follows programs' constraints


def check_may_look() -> None:
    """Raise in the thread that follows programs' constraints: there a context lacks the tokens that run ahead."""
    if hasattr(_own_calls, "looked"):
        _own_calls.looked = True
        raise LooksAtContext("a constraint that is followed ahead of its program cannot look at a context")


@cache
def _program_thread() -> queue.SimpleQueue[ProgramMask]:
    """The queue of the thread that follows programs' own constraints."""
    waiting: queue.SimpleQueue[ProgramMask] = queue.SimpleQueue()
    threading.Thread(target=_follow_programs, args=(waiting,), name="headway-constraints", daemon=True).start()
    return waiting


def _follow_programs(waiting: queue.SimpleQueue[ProgramMask]) -> None:
    never_wait()
    while True:
        _compute_own(waiting)


def _compute_own(waiting: queue.SimpleQueue[ProgramMask]) -> None:
    """Compute what waits, in order, and wake whoever waits for it: at the end, since a step waits for all of it."""
    masks = [waiting.get()]
    masks += [waiting.get() for _ in range(waiting.qsize())]
    for mask in masks:
        if mask.begin():
            mask.compute()
            mask.done = True
    with _computed:
        _computed.notify_all()


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
