"""Many compiled grammars move on together: what `accept` and `mask` give each of them, in a fraction of the time.

The compiler's own threads do the work, and the interpreter's lock is let go once for all rows: who lets it go for each
row must win it back each time from threads that have much to do. A row with anything special to it, or with which
something goes wrong, goes its own way afterwards, one by one, and nothing of that touches the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from headway.base.errors import Closed, HeadwayError
from headway.base.machine import read_machine
from headway.program.constraints.bitmask import MaskWords
from headway.program.constraints.constraint import Matched, settle

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Result = TypeVar("Result")
THREADS = 8  # at most: the device's worker and the event loop want to run beside them
FEW = 4  # rows; fewer are done before other threads have woken up


def accept_all(rows: Sequence[tuple[Matched, int]]) -> list[HeadwayError | None]:
    """A token for each of these grammars, which are all different ones; the error of each that did not accept."""
    takers = {} if len(rows) < FEW else _takers(rows)
    well = _workers().consume_token_par([(taker, rows[i][1]) for i, taker in takers.items()]) if takers else []
    taken = {i for i, good in zip(takers, well, strict=True) if good}
    found: list[HeadwayError | None] = [None] * len(rows)
    for i, (grammar, token) in enumerate(rows):
        if i in taken:
            grammar.took(token)
        else:
            found[i] = _tried(partial(grammar.accept, token))
    return found


def _takers(rows: Sequence[tuple[Matched, int]]) -> dict[int, LLMatcher]:
    """Those that can be given their token at once, by row."""
    found = ((i, grammar.taker(token)) for i, (grammar, token) in enumerate(rows))
    return {i: taker for i, taker in found if taker is not None}


def masks_of(grammars: Sequence[Matched]) -> list[np.ndarray | HeadwayError]:
    """What may come next in each of these grammars, which are all different ones; an error where nothing may.

    A mask is a row of one array: whoever keeps one keeps them all.
    """
    alike: dict[MaskWords, list[int]] = {}
    for i, grammar in enumerate(grammars if len(grammars) >= FEW else ()):
        if grammar.masker is not None:
            alike.setdefault(grammar.words, []).append(i)
    found: dict[int, np.ndarray | HeadwayError] = {}
    for places in alike.values():
        if len(places) >= FEW:
            found.update(zip(places, _computed([grammars[i] for i in places]), strict=True))
    return [found[i] if i in found else _tried(grammar.mask) for i, grammar in enumerate(grammars)]


def _computed(grammars: list[Matched]) -> list[np.ndarray | HeadwayError]:
    """The masks of grammars that are laid out alike."""
    room = grammars[0].words.room(len(grammars))
    maskers = [masker for grammar in grammars if (masker := grammar.masker) is not None]
    work = [(masker, i) for i, masker in enumerate(maskers)]
    _workers().unsafe_compute_mask_ptr(work, room.ctypes.data, room[0].nbytes, len(room))
    found: list[np.ndarray | HeadwayError] = [*settle(grammars, room)]
    for masker, i in work:
        if masker.is_error():  # it may be that the table is full, and `mask` knows a way out
            found[i] = _tried(grammars[i].mask)
    return found


def _tried(work: Callable[[], Result]) -> Result | HeadwayError:
    """What work gives, or its error."""
    try:
        return work()
    except HeadwayError as error:
        return error
    except BaseException as error:  # a fault of ours, or of the compiler's; the other rows go on
        return fault(error)


def fault(error: BaseException) -> Closed:
    """What becomes of a mask when something went wrong that is nobody's grammar."""
    return Closed(f"the mask was not computed after an internal error: {error!r}")


@cache
def _workers() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(min(THREADS, read_machine().fair_threads))
