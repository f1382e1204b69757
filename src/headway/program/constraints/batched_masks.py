"""`accept` and `mask` for many compiled grammars at once, in a fraction of the time.

The grammar library's own threads do the work, and Python's global lock is released once for all rows: releasing it for
each row would mean to win it back each time from busy threads. Rows that need special treatment, or that fail, are done
one by one afterwards and do not affect the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from headway.base.errors import Closed, HeadwayError
from headway.program.constraints.bitmask import MaskLayout
from headway.program.constraints.budget import SUSPECT, executor
from headway.program.constraints.constraint import GrammarMatcher, finish_masks

if TYPE_CHECKING:
    from llguidance import LLMatcher

Result = TypeVar("Result")
FEW = 4  # rows; fewer are done before other threads wake up


def accept_all(rows: Sequence[tuple[GrammarMatcher, int]]) -> list[HeadwayError | None]:
    """Give each of these grammars, all different, its token; the error of each that did not accept it."""
    matchers = {} if len(rows) < FEW else _consumers(rows)
    done: list[bool] = []
    if matchers:
        with _watched([rows[i][0] for i in matchers]):
            done = executor().consume_token_par([(matcher, rows[i][1]) for i, matcher in matchers.items()])
    accepted = {i for i, good in zip(matchers, done, strict=True) if good}
    errors: list[HeadwayError | None] = [None] * len(rows)
    for i, (grammar, token) in enumerate(rows):
        if i in accepted:
            grammar.record(token)
        else:
            errors[i] = _attempt(partial(grammar.accept, token))
    return errors


def _consumers(rows: Sequence[tuple[GrammarMatcher, int]]) -> dict[int, LLMatcher]:
    """The matchers that can be given their token unchecked, by row."""
    matchers = ((i, grammar.consumer(token)) for i, (grammar, token) in enumerate(rows))
    return {i: matcher for i, matcher in matchers if matcher is not None}


def masks_of(grammars: Sequence[GrammarMatcher]) -> list[np.ndarray | HeadwayError]:
    """The mask of each of these grammars, all different, or an error where nothing may come next.

    A mask is a row of one array, so keeping one keeps them all in memory.
    """
    alike: dict[MaskLayout, list[int]] = {}
    for i, grammar in enumerate(grammars if len(grammars) >= FEW else ()):
        if grammar.mask_matcher is not None:
            alike.setdefault(grammar.layout, []).append(i)
    masks: dict[int, np.ndarray | HeadwayError] = {}
    for places in alike.values():
        if len(places) >= FEW:
            masks.update(zip(places, _compute([grammars[i] for i in places]), strict=True))
    return [masks[i] if i in masks else _attempt(grammar.mask) for i, grammar in enumerate(grammars)]


def _compute(grammars: list[GrammarMatcher]) -> list[np.ndarray | HeadwayError]:
    """The masks of grammars with the same layout."""
    rows = grammars[0].layout.buffer(len(grammars))
    matchers = [matcher for grammar in grammars if (matcher := grammar.mask_matcher) is not None]
    work = [(matcher, i) for i, matcher in enumerate(matchers)]
    with _watched(grammars):
        executor().unsafe_compute_mask_ptr(work, rows.ctypes.data, rows[0].nbytes, len(rows))
    masks: list[np.ndarray | HeadwayError] = [*finish_masks(grammars, rows)]
    for matcher, i in work:
        if matcher.is_error():  # its table of states may be full, which `mask` handles
            masks[i] = _attempt(grammars[i].mask)
    return masks


@contextmanager
def _watched(grammars: Sequence[GrammarMatcher]) -> Iterator[None]:
    """If this takes long, any of these grammars may be slow: each is followed by itself next, to find out which."""
    began = time.perf_counter()
    yield
    if time.perf_counter() - began > SUSPECT:
        for grammar in grammars:
            grammar.pace.suspect()


def _attempt(work: Callable[[], Result]) -> Result | HeadwayError:
    """The result of `work`, or its error."""
    try:
        return work()
    except HeadwayError as error:
        return error
    except BaseException as error:  # a bug, ours or the grammar library's; the other rows go on
        return internal_error(error)


def internal_error(error: BaseException) -> Closed:
    """The error of a mask that failed for a reason other than its grammar."""
    return Closed(f"the mask was not computed after an internal error: {error!r}")
