"""One sequence's pages and the log of its slots. Pure bookkeeping; the engine's lock guards it.

        slots   0        16        32        48    53
        pages   [  full  ][  full  ][  full  ][ 5… ][     ]
                └─ committed: full, immutable, shared ─┘└─ working ─┘
                                                  length = 53

`pages` has an entry for every page of the sequence, None where one was discarded; `committed` counts leading pages,
discarded ones included, so page and slot numbers never move. The log says how each slot came to be (token, position,
the mask it attended under), which is what it takes to compute it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice

from headway.base.brle import Brle
from headway.base.errors import InvalidInput, OutOfPages, OutOfRange
from headway.kv.allocator import Allocator


@dataclass(frozen=True)
class Log:
    """What is added to a table when a pass succeeds: one entry a token."""

    tokens: Sequence[int]
    positions: Sequence[int]
    masks: Sequence[Brle | None]
    ahead: int = 0  # how many of the last tokens attended to later ones


@dataclass(frozen=True, eq=False)
class Mark:
    """What a table was, for going back to it."""

    pages: int
    committed: int
    length: int
    state: object


class PageTable:
    """The pages of one sequence; see the file's picture."""

    def __init__(self, allocator: Allocator, page_size: int) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.pages: list[int | None] = []
        self.committed = 0
        self.length = 0
        self.tokens = array("q")
        self.positions = array("q")
        self.peaks = array("q")  # the largest position so far, at each slot
        self.masks: list[Brle | None] = []
        self.spans: list[tuple[int, int]] = []  # slots computed by passes that were not causal
        self.repeatable = True  # whether the log still says how every slot came to be
        self.state: object = None  # the last token's final residual, while the device keeps it
        self.closed = False

    # -- reading ---------------------------------------------------------------------------------------------------

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
        return [p for p in self.pages if p is not None]

    def live(self, slots: int) -> Brle:
        """Which of the first `slots` slots were not discarded."""
        size = self.page_size
        gone = [(i * size, min((i + 1) * size, slots)) for i, p in enumerate(self.pages) if p is None]
        return ~Brle.from_intervals(slots, [(a, b) for a, b in gone if a < slots])

    @property
    def has_discards(self) -> bool:
        return None in self.pages

    # -- a pass ----------------------------------------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        """How many pages must be added before this many more tokens fit."""
        return max(0, -(-(self.length + tokens) // self.page_size) - len(self.pages))

    @contextmanager
    def adding(self, pages: int) -> Iterator[list[int]]:
        """Pages that are given back if the body raises; the body keeps them by putting them in the table."""
        taken = self.allocator.take(pages)
        try:
            yield taken
        except BaseException:
            self.allocator.drop(taken)
            raise

    def advance(self, log: Log, pages: Sequence[int], *, commit: bool) -> None:
        """A pass has succeeded: its pages and tokens are part of the sequence."""
        self.pages.extend(pages)
        self.tokens.extend(log.tokens)
        self.positions.extend(log.positions)
        self.peaks.extend(islice(accumulate(log.positions, max, initial=self.next_position - 1), 1, None))
        self.masks.extend(log.masks)
        self.length += len(log.tokens)
        if log.ahead:
            self.spans.append((self.length - log.ahead, self.length))
        if commit:
            self.committed = max(self.committed, self.length // self.page_size)

    def restore(
        self, tokens: Sequence[int], positions: Sequence[int], masks: list[Brle | None], committed: int
    ) -> None:
        """Take over a log that was written elsewhere, for pages that are here already."""
        self.advance(Log(tokens, positions, masks), (), commit=False)
        self.committed = committed

    def mark(self) -> Mark:
        """Where the sequence stands now."""
        return Mark(len(self.pages), self.committed, self.length, self.state)

    def rewind(self, mark: Mark) -> None:
        """Undo a pass that nobody built on."""
        self._cut_pages(mark.pages)
        self.committed = mark.committed
        self._cut_log(mark.length)
        self.state = mark.state

    # -- page operations -------------------------------------------------------------------------------------------

    def reserve(self, n: int) -> None:
        """Add n empty working pages."""
        _count("reserve_working_pages", n)
        self.pages.extend(self.allocator.take(n))

    def commit(self, k: int) -> None:
        """Make the first k working pages immutable; each must be full."""
        _count("commit_working_pages", k)
        full = self.length // self.page_size - self.committed
        if k > full:
            raise InvalidInput(
                f"commit_working_pages({k}): {max(full, 0)} of {self.working} working pages are full; "
                "only full pages commit"
            )
        self.committed += k

    def release(self, n: int) -> None:
        """Free the last n working pages, and with them the tokens they hold."""
        _count("release_working_pages", n)
        if n > self.working:
            raise InvalidInput(f"release_working_pages({n}): there are {self.working} working pages")
        keep = len(self.pages) - n
        self._cut_pages(keep)
        self._cut_log(min(self.length, keep * self.page_size))

    def truncate_working(self, n: int) -> None:
        """Drop the last n tokens, which must lie in working pages; the pages stay reserved."""
        _count("truncate_working_page_tokens", n)
        if n > self.working_tokens:
            raise InvalidInput(
                f"truncate_working_page_tokens({n}): the working pages hold {self.working_tokens} tokens; "
                "ctx.truncate also cuts into committed pages"
            )
        self._cut_log(self.length - n)

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
        self._cut_pages(whole + (1 if part else 0))
        self._cut_log(keep)

    def discard(self, start: int, n: int) -> None:
        """Free n full pages from page number `start`; their slots stay counted and can never be attended again."""
        _count("discard_pages", n)
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise InvalidInput(f"discard_pages: start is {start!r}; a page number from 0 is needed")
        full = self.length // self.page_size
        limit = min(full, max(self.length - 1, 0) // self.page_size)  # the page of the last token stays
        if start + n > limit:
            can = f"pages 0 to {limit - 1} are" if limit else "no page is"
            raise OutOfRange(f"discard_pages({start}, {n}): {can} full and not the last; others cannot be discarded")
        chosen = range(start, start + n)
        gone = [i for i in chosen if self.pages[i] is None]
        if gone:
            raise InvalidInput(f"discard_pages({start}, {n}): page {gone[0]} was discarded before")
        self.allocator.drop([p for i in chosen if (p := self.pages[i]) is not None])
        for i in chosen:
            self.pages[i] = None

    def fork(self) -> PageTable:
        """A table that shares the committed pages and has copies of the working pages that hold tokens."""
        child = PageTable(self.allocator, self.page_size)
        used = -(-self.length // self.page_size)
        copies = [i for i in range(self.committed, used) if self.pages[i] is not None]
        fresh = dict(zip(copies, self.allocator.take(len(copies)), strict=True))
        shared = [p for p in self.pages[: self.committed] if p is not None]
        self.allocator.share(shared)
        for i, target in fresh.items():
            source = self.pages[i]
            assert source is not None
            self.allocator.copy(source, target, min(self.page_size, self.length - i * self.page_size))
        child.pages = [*self.pages[: self.committed], *(fresh.get(i) for i in range(self.committed, used))]
        child.committed, child.length, child.state = self.committed, self.length, self.state
        child.tokens, child.positions, child.peaks = self.tokens[:], self.positions[:], self.peaks[:]
        child.masks, child.spans, child.repeatable = self.masks[:], self.spans[:], self.repeatable
        return child

    def close(self) -> None:
        """Give every page back; the table is empty and over."""
        if not self.closed:
            self.closed = True
            self._cut_pages(0)
            self.committed, self.length, self.state = 0, 0, None

    # -- cutting ---------------------------------------------------------------------------------------------------

    def _thaw(self, number: int, slots: int) -> None:
        """Replace a committed page by a working copy of its first slots."""
        page = self.pages[number]
        assert page is not None
        if self.allocator.free == 0 and self.allocator.holders(page) == 1:
            return  # nobody else sees it, so it may become a working page itself
        if self.allocator.free == 0:
            raise OutOfPages(
                f"truncate keeps {slots} slots of a shared page and needs one free page for the copy; "
                f"0 of {self.allocator.total} are free"
            )
        (fresh,) = self.allocator.take(1)
        self.allocator.copy(page, fresh, slots)
        self.pages[number] = fresh
        self.allocator.drop([page])

    def _cut_pages(self, keep: int) -> None:
        self.allocator.drop([p for p in self.pages[keep:] if p is not None])
        del self.pages[keep:]

    def _cut_log(self, keep: int) -> None:
        if keep < self.length:
            self.state = None
            # A slot that attended to one that is now gone cannot be computed again from the log.
            self.repeatable &= not any(start < keep < stop for start, stop in self.spans)
            self.spans = [span for span in self.spans if span[0] < keep]
        del self.tokens[keep:], self.positions[keep:], self.peaks[keep:], self.masks[keep:]
        self.length = keep


def _count(what: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise InvalidInput(f"{what}: the number of pages or tokens is {n!r}; a whole number from 0 is needed")
