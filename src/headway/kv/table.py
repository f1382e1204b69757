"""One sequence's pages and the log of its slots. Pure bookkeeping; the engine's lock guards it.

        slots   0        16        32        48    53
        pages   [  full  ][  full  ][  full  ][ 5… ][     ]
                └─ committed: full, immutable, shared ─┘└─ working ─┘
                                                  length = 53

`pages` has an entry for every page of the sequence, None where one was discarded; `committed` counts leading pages,
discarded ones included, so page and slot numbers never move. The log says how each slot came to be (token, position,
the mask it attended under, its adapters), which is what it takes to compute it again. A table that was preempted keeps
its log and gives up its pages: their entries are ABSENT until they are computed again or copied back (`host`). Where
a model has recurrent layers, `states` has its checkpoints (kv/states.py); without one at its end it is behind, and
computes from the nearest earlier one on again.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple, TypeGuard

import numpy as np

from headway.base.arrays import numbers
from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, OutOfPages, OutOfRange
from headway.base.specs.adapters import AdapterMix, Mixes
from headway.base.specs.brle import Brle
from headway.kv.allocator import Allocator, Clear, Copy, Export, HostPages, Import
from headway.kv.prefix import page_key, root
from headway.kv.states import States, TableStates

_births = itertools.count()

ABSENT = 0  # a page that was preempted


@dataclass(frozen=True, slots=True)
class Log:
    """What is added to a table when a pass succeeds: one entry a token."""

    tokens: Sequence[int]
    positions: Sequence[int]
    masks: Sequence[Brle | None]
    ahead: int = 0  # how many of the last tokens attended to later ones
    adapters: Mixes | None = None  # None: no token has one


class Mark(NamedTuple):
    """What a table was, for going back to it."""

    pages: int
    committed: int
    length: int
    state: object
    stamp: object


class PageTable:
    """The pages of one sequence; see the file's picture."""

    def __init__(self, allocator: Allocator, page_size: int, salt: str = "", states: States | None = None) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.salt = salt
        self.states = None if states is None else TableStates(states, page_size)
        self.bid = 0.0
        self.born = next(_births)  # the youngest has the largest
        self.deadline = math.inf  # on time.monotonic's clock
        self.token_budget: int | None = None  # tokens that may still be computed
        self.idle_first = False  # a saved context: the first to be preempted
        self.host: HostPages | None = None  # where its pages are, when they cannot be computed again
        self.keys: list[bytes | None] = []  # of committed pages; None from where the chain is broken
        self.pages = []
        self.committed = 0
        self.length = 0
        self.tokens = array("q")
        self.positions = array("q")
        self.peaks = array("q")  # the largest position so far, at each slot
        self.masks: list[Brle | None] = []
        self.adapters: list[AdapterMix | None] = []
        self.spans: list[tuple[int, int]] = []  # slots computed by passes that were not causal
        self.repeatable = True  # whether the log still says how every slot came to be
        self.altered: int | None = None  # the first slot whose contents the log does not explain (kv/moves.py)
        self.partial: set[int] = set()  # slots that attended to more than the log says, to slots that are gone
        self.state: object = None  # the last token's final residual, while the device keeps it
        self.closed = False
        self.lost: str | None = None  # why its contents are gone, when the device has failed
        self.stamp = object()  # another one after every change to the sequence

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def pages(self) -> Sequence[int | None]:
        """The page of each page number, None where one was discarded. It is replaced, never changed in place."""
        return self._pages

    @pages.setter
    def pages(self, pages: Sequence[int | None]) -> None:
        self._pages = pages
        self.has_discards = None in pages
        self.is_preempted = ABSENT in pages  # some must be resumed before anything can be computed
        self._physical: np.ndarray | None = None

    @property
    def physical(self) -> np.ndarray:
        """The same as an array [P], 0 where there is no page; it stays what it was when the table changes."""
        if self._physical is None:
            self._physical = np.array([p or 0 for p in self._pages], dtype=np.int64)
        return self._physical

    @property
    def working(self) -> int:
        return len(self.pages) - self.committed

    @property
    def working_tokens(self) -> int:
        return self.length - min(self.length, self.committed * self.page_size)

    @property
    def next_position(self) -> int:
        return self.peaks[-1] + 1 if self.peaks else 0

    def held(self) -> list[int]:
        """The physical pages this table holds."""
        return [p for p in self.pages if is_there(p)]

    @property
    def is_behind(self) -> bool:
        """Whether the recurrent state at its end must be computed again."""
        return self.states is not None and self.states.at(self.length) is None

    @property
    def must_replay(self) -> bool:
        """Whether something of it must be computed again, or copied back, before its next pass."""
        return self.is_preempted or self.is_behind

    @property
    def last_key(self) -> bytes | None:
        """The key that the next page's key follows; None when its pages cannot be cached."""
        return self.keys[-1] if self.keys else root(self.salt)

    def live(self, slots: int) -> Brle:
        """Which of the first `slots` slots were not discarded."""
        size = self.page_size
        gone = [(i * size, min((i + 1) * size, slots)) for i, p in enumerate(self.pages) if p is None]
        return ~Brle.from_intervals(slots, [(a, b) for a, b in gone if a < slots])

    # -- a pass ----------------------------------------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        """How many pages must be added before this many more tokens fit."""
        return max(0, -(-(self.length + tokens) // self.page_size) - len(self.pages))

    def advance(self, log: Log, pages: Sequence[int], *, commit: bool, keys: Sequence[bytes] = ()) -> None:
        """A pass has succeeded: its pages and tokens are part of the sequence.

        `keys` are those of the pages that it fills and commits, where they are known.
        """
        if pages:
            self.pages = [*self.pages, *pages]
        self.tokens.extend(array("q", log.tokens))
        if len(log.positions) == 1:  # most passes
            self.peaks.append(max(self.next_position - 1, log.positions[0]))
            self.positions.extend(log.positions)
        elif isinstance(log.positions, range) and log.positions.start >= self.next_position:
            positions = array("q", numbers(log.positions).tobytes())
            self.peaks.extend(positions)
            self.positions.extend(positions)
        else:
            self.peaks.extend(islice(accumulate(log.positions, max, initial=self.next_position - 1), 1, None))
            self.positions.extend(log.positions)
        self.masks.extend(log.masks)
        self.adapters.extend((None,) * len(log.tokens) if log.adapters is None else log.adapters)
        self.length += len(log.tokens)
        if log.ahead:
            self.spans.append((self.length - log.ahead, self.length))
        if commit and self.length >= (self.committed + 1) * self.page_size:
            self.commit_up_to(self.length // self.page_size, keys)
        self.stamp = object()

    def append(
        self, token: int, mask: Brle | None, page: int | None, state: object, adapters: AdapterMix | None = None
    ) -> None:
        """One more token, at the position after all others, computed alone; its page stays a working page for now."""
        if page is not None:
            self.pages = [*self.pages, page]
        position = self.next_position
        self.tokens.append(token)
        self.positions.append(position)
        self.peaks.append(position)
        self.masks.append(mask)
        self.adapters.append(adapters)
        self.length += 1
        self.state, self.stamp = state, object()

    def commit_up_to(self, pages: int, known: Sequence[bytes] = ()) -> None:
        """The first `pages` pages are immutable now, and found by their keys."""
        size = self.page_size
        for i in range(self.committed, pages):
            if i - self.committed < len(known):
                self._name(i, known[i - self.committed])
                continue
            slots, before = slice(i * size, (i + 1) * size), self.last_key
            ahead = any(start < (i + 1) * size for start, _ in self.spans)
            if before is None or ahead or not self.repeatable or self.is_altered((i + 1) * size - 1):
                self.keys.append(None)
                continue
            log = (self.tokens[slots], self.positions[slots], self.masks[slots], self.adapters[slots])
            self._name(i, page_key(before, *log))
        self.committed = max(self.committed, pages)

    def _name(self, number: int, key: bytes) -> None:
        """Have a page found by its key."""
        self.keys.append(key)
        page = self.pages[number]
        if is_there(page):
            self.allocator.register(page, key)
        if self.states is not None and (state := self.states.at((number + 1) * self.page_size)) is not None:
            self.states.states.register(state, key)

    def restore(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        masks: list[Brle | None],
        committed: int,
        adapters: Mixes | None = None,
    ) -> None:
        """Take over a log that was written elsewhere, for pages that are here already."""
        self.advance(Log(tokens, positions, masks, adapters=adapters), (), commit=False)
        self.commit_up_to(committed)

    def mark(self) -> Mark:
        """Where the sequence stands now."""
        return Mark(len(self.pages), self.committed, self.length, self.state, self.stamp)

    def rewind(self, mark: Mark) -> None:
        """Undo a pass that nobody built on."""
        for number in range(mark.committed, min(mark.pages, self.committed)):  # the pass committed these
            page = self.pages[number]
            if is_there(page) and self.allocator.holders(page) > 1:
                self._thaw(number, min(self.page_size, mark.length - number * self.page_size))
            elif is_there(page):
                self.allocator.forget(page)
        self._cut_pages(mark.pages)
        self.committed = mark.committed
        del self.keys[mark.committed :]
        self.cut_log(mark.length)
        self.state, self.stamp = mark.state, mark.stamp

    # -- page operations -------------------------------------------------------------------------------------------

    def reserve(self, n: int) -> None:
        """Add n empty working pages."""
        _count("reserve_working_pages", n)
        self.pages = [*self.pages, *self.allocator.take(n)]
        self.stamp = object()

    def commit(self, k: int) -> None:
        """Make the first k working pages immutable; each must be full."""
        _count("commit_working_pages", k)
        full = self.length // self.page_size - self.committed
        if k > full:
            raise InvalidInput(
                f"commit_working_pages({k}): {max(full, 0)} of {self.working} working pages are full; "
                "only full pages commit"
            )
        self.commit_up_to(self.committed + k)
        self.stamp = object()

    def release(self, n: int) -> None:
        """Free the last n working pages, and with them the tokens they hold."""
        _count("release_working_pages", n)
        if n > self.working:
            raise InvalidInput(f"release_working_pages({n}): there are {self.working} working pages")
        keep = len(self.pages) - n
        self._cut_pages(keep)
        self.cut_log(min(self.length, keep * self.page_size))

    def truncate_working(self, n: int) -> None:
        """Drop the last n tokens, which must lie in working pages; the pages stay reserved."""
        _count("truncate_working_page_tokens", n)
        if n > self.working_tokens:
            raise InvalidInput(
                f"truncate_working_page_tokens({n}): the working pages hold {self.working_tokens} tokens; "
                "ctx.truncate also cuts into committed pages"
            )
        keep = self.length - n
        gone = [i for i in range(keep // self.page_size, len(self.pages)) if self.pages[i] is None]
        if gone:
            raise InvalidInput(
                f"truncate_working_page_tokens({n}) would cut into page {gone[0]}, which was discarded; "
                "ctx.truncate can cut at its border"
            )
        self.cut_log(keep)

    def truncate(self, n: int) -> None:
        """Drop the last n tokens across pages; a cut inside a committed page copies what is kept."""
        if n == 0:
            return  # reserved pages stay
        keep = self.length - n
        assert 0 <= keep <= self.length
        whole, part = divmod(keep, self.page_size)
        if part and self.pages[whole] is None:
            raise InvalidInput(
                f"truncate would cut inside page {whole}, which was discarded; cut at a multiple of {self.page_size}, "
                "or to a slot after it"
            )
        if part and whole < self.committed:
            self._thaw(whole, part)
        self.committed = min(self.committed, whole)
        del self.keys[self.committed :]
        self._cut_pages(whole + (1 if part else 0))
        self.cut_log(keep)

    def discard(self, start: int, n: int) -> None:
        """Free n full pages from page number `start`; their slots stay counted and can never be attended again."""
        assert not self.is_preempted  # other slots may need these to be computed again
        _count("discard_pages", n)
        check_integer(start, "discard_pages: the first page")
        full = self.length // self.page_size
        if start + n > full:
            can = f"pages 0 to {full - 1} are" if full else "no page is"
            raise OutOfRange(f"discard_pages({start}, {n}): {can} full; others cannot be discarded")
        chosen = range(start, start + n)
        gone = [i for i in chosen if self.pages[i] is None]
        if gone:
            raise InvalidInput(f"discard_pages({start}, {n}): page {gone[0]} was discarded before")
        self.allocator.drop([p for i in chosen if is_there(p := self.pages[i])])
        self.pages = [None if i in chosen else p for i, p in enumerate(self.pages)]
        self.stamp = object()

    @property
    def pages_to_fork(self) -> int:
        """Pages without which it cannot be forked: copies of working pages that cannot be computed again."""
        return 0 if self.can_replay else len(self._filled_working())

    def pages_to_truncate(self, n: int) -> int:
        """Pages without which n tokens cannot be dropped: a copy of a shared page that cannot be computed again."""
        whole, part = divmod(self.length - n, self.page_size)
        if not part or whole >= self.committed or self.can_replay:
            return 0
        page = self.pages[whole]
        return int(is_there(page) and self.allocator.holders(page) > 1)

    def _filled_working(self) -> list[int]:
        """The numbers of the working pages that hold tokens."""
        used = -(-self.length // self.page_size)
        return [i for i in range(self.committed, used) if is_there(self.pages[i])]

    def fork(self) -> PageTable:
        """A table that shares the committed pages and has copies of the working pages that hold tokens."""
        child = PageTable(self.allocator, self.page_size, self.salt)
        child.states = None if self.states is None else self.states.share()
        used, copies = -(-self.length // self.page_size), self._filled_working()
        if len(copies) > self.allocator.available and self.can_replay:
            copies = []  # no room for copies: the fork computes these slots again when it needs them
        fresh = dict(zip(copies, self.allocator.take(len(copies)), strict=True))
        self.allocator.share([p for p in self.pages[: self.committed] if is_there(p)])
        for i, target in fresh.items():
            source = self.pages[i]
            assert is_there(source)
            self.allocator.edit(Copy(source, target, min(self.page_size, self.length - i * self.page_size)))
        tail = [fresh.get(i, None if self.pages[i] is None else ABSENT) for i in range(self.committed, used)]
        child.pages = [*self.pages[: self.committed], *tail]
        child.keys, child.host, child.lost = self.keys[:], self.host, self.lost
        child.bid, child.deadline, child.token_budget = self.bid, self.deadline, self.token_budget
        child.committed, child.length, child.state = self.committed, self.length, self.state
        child.tokens, child.positions, child.peaks = self.tokens[:], self.positions[:], self.peaks[:]
        child.masks, child.adapters = self.masks[:], self.adapters[:]
        child.spans, child.repeatable = self.spans[:], self.repeatable
        child.altered, child.partial = self.altered, set(self.partial)
        return child

    def close(self) -> None:
        """Give every page back; the table is empty and over."""
        if not self.closed:
            self.closed = True
            self._cut_pages(0)
            self.committed, self.length, self.state = 0, 0, None
            self.adapters = []  # they may go with it
            if self.states is not None:
                self.states.cut(-1)

    # -- preemption ------------------------------------------------------------------------------------------------

    @property
    def can_replay(self) -> bool:
        """Whether every slot can be computed again from the log, page for page."""
        deferred = self.length // self.page_size > self.committed
        return self.log_suffices and not deferred

    @property
    def log_suffices(self) -> bool:
        """The same, full pages that are not committed yet included: nothing is lost while this is so."""
        return self.repeatable and not self.spans and not self.has_discards and self.altered is None

    def preempt(self) -> None:
        """Give every page up: to be computed again from the log, or with a copy in host memory where that cannot be."""
        if not self.can_replay and not self.is_preempted:
            held = [(i, p) for i, p in enumerate(self.pages) if is_there(p)]
            self.host = HostPages(tuple(i for i, _ in held))
            self.allocator.edit(Export(tuple(p for _, p in held), self.host))
        self._give_up()

    def recover(self, host: HostPages | None, why: str) -> None:
        """Give up damaged pages: to be computed again, or copied from `host`; else the table is lost."""
        if self.log_suffices:
            self.host = None
            self._give_up()
        elif host is not None:
            self.host = host
            self._give_up()
        else:
            self.lost = why

    def _give_up(self) -> None:
        self.allocator.drop(self.held())
        self.pages = [ABSENT if is_there(p) else p for p in self.pages]

    def absent(self) -> list[int]:
        """The numbers of the pages that must come back before anything can be computed."""
        return [i for i, p in enumerate(self.pages) if p == ABSENT]

    def resume(self, pages: Sequence[int]) -> None:
        """Pages for every absent one, in order, with their contents."""
        numbers = self.absent()
        if self.host is not None:
            place = {n: i for i, n in enumerate(self.host.numbers)}
            known = [(place[n], p) for n, p in zip(numbers, pages, strict=True) if n in place]
            self.allocator.edit(Import(self.host, tuple(i for i, _ in known), tuple(p for _, p in known)))
        copied, self.host = self.host is not None, None
        there = dict(zip(numbers, pages, strict=True))
        self.pages = [there.get(i, p) for i, p in enumerate(self.pages)]
        if copied:
            self.wipe()  # what was cut off meanwhile is in the copy
        for number, page in there.items():
            if number < len(self.keys) and (key := self.keys[number]) is not None:
                self.allocator.register(page, key)

    # -- cutting ---------------------------------------------------------------------------------------------------

    def _thaw(self, number: int, slots: int) -> None:
        """Replace a committed page by a working copy of its first slots."""
        page = self.pages[number]
        if not is_there(page):
            return  # it was preempted: what is kept of it comes back as a working page
        if self.allocator.holders(page) == 1 and (self.allocator.available == 0 or not self.allocator.is_keyed(page)):
            self.allocator.forget(page)  # nobody else sees it, so it may become a working page itself
            return
        if self.allocator.available == 0 and self.can_replay:
            self.allocator.drop([page])
            self._put(number, ABSENT)  # computed again when it is needed
            return
        if self.allocator.available == 0:
            raise OutOfPages(
                f"truncate keeps {slots} slots of a shared page and needs one free page for the copy; "
                f"0 of {self.allocator.total} are free"
            )
        (fresh,) = self.allocator.take(1)
        self.allocator.edit(Copy(page, fresh, slots))
        self._put(number, fresh)
        self.allocator.drop([page])

    def _put(self, number: int, page: int) -> None:
        self.pages = [*self.pages[:number], page, *self.pages[number + 1 :]]

    def _cut_pages(self, keep: int) -> None:
        self.allocator.drop([p for p in self.pages[keep:] if is_there(p)])
        if keep < len(self.pages):
            self.pages = self.pages[:keep]
        if self.host is not None and not self.is_preempted:
            self.host = None  # nothing of it is needed any more

    def is_altered(self, slot: int) -> bool:
        """Whether the log does not explain a slot's contents."""
        return self.altered is not None and slot >= self.altered

    def alter(self, slot: int | None, partial: Iterable[int] = ()) -> None:
        """The log explains nothing from this slot on."""
        if slot is not None:
            self.altered = slot if self.altered is None else min(self.altered, slot)
        self.partial.update(partial)

    def cut_log(self, keep: int) -> None:
        """Forget the slots from `keep` on."""
        if self.altered is not None and keep <= self.altered:
            self.altered = None
        if self.partial:
            self.partial = {slot for slot in self.partial if slot < keep}
        if keep < self.length:
            self.state = None
            # A slot that attended to one that is now gone cannot be computed again from the log.
            self.repeatable &= not any(start < keep < stop for start, stop in self.spans)
            self.spans = [span for span in self.spans if span[0] < keep]
            self.repeatable |= not self.spans  # such slots are gone themselves
        del self.tokens[keep:], self.positions[keep:], self.peaks[keep:], self.masks[keep:], self.adapters[keep:]
        shorter, self.length, self.stamp = keep < self.length, keep, object()
        if self.states is not None:
            self.states.cut(keep)
        if shorter:
            self.wipe()

    def wipe(self) -> None:
        """Zero what was written after the last slot: an infinity there would show through every mask."""
        whole, part = divmod(self.length, self.page_size)
        for number in range(max(whole, self.committed), len(self.pages)):
            page = self.pages[number]
            if is_there(page):
                self.allocator.edit(Clear(page, part if number == whole else 0))


def is_there(page: int | None) -> TypeGuard[int]:
    """Whether an entry of `pages` is a physical page."""
    return page is not None and page > 0


def _count(what: str, n: int) -> None:
    check_integer(n, f"{what}: the number of pages or tokens")
