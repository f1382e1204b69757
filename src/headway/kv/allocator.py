"""Which pages are free, held or cached. Pure bookkeeping; the engine's lock guards it.

        free ──take──▶ held ──drop──▶ free                        (a page without a key)
                        │ ▲
                        └─┼─drop──▶ cached ──evicted──▶ free      (a page with a key: its contents can be found again)
                          └──share────┘

A page has any number of holders. Page 0 is never handed out: it stays zero, and stands for "no page" wherever a tensor
needs a number. Handing a page out or copying one also needs work on the device; it is noted as an edit, in order, and
done before the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from itertools import islice

from headway.base.dataclass import dataclass
from headway.base.errors import OutOfPages
from headway.kv.tiers.page_store import PageName, PageSource, PageStore


@dataclass(frozen=True)
class Clear:
    """Zero a page that got a new owner, or the slots after a sequence's end in its own."""

    page: int
    start: int = 0


@dataclass(frozen=True)
class Copy:
    """Copy the first slots of a page to another."""

    source: int
    target: int
    slots: int


@dataclass(frozen=True)
class Gather:
    """Copy single slots, each by its page and its place there, to consecutive slots of a page from `start` on.

    Their keys are rotated by `shift` positions, from those in `positions`.
    """

    pages: tuple[int, ...]
    places: tuple[int, ...]
    target: int
    start: int
    positions: tuple[int, ...] = ()
    shift: int = 0


@dataclass(eq=False)
class HostPages:
    """Pages of a preempted context, in host memory, by their numbers in the sequence.

    The device's owner fills and reads `data`.
    """

    numbers: tuple[int, ...]
    data: object = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Export:
    """Copy pages to host memory."""

    pages: tuple[int, ...]
    target: HostPages


@dataclass(frozen=True, eq=False)
class Import:
    """Copy pages back from host memory: entries `places` of it go to `pages`."""

    source: HostPages
    places: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Save:
    """Copy pages that leave the prefix cache to places in host memory, under their names."""

    pages: tuple[int, ...]
    store: PageStore
    places: tuple[int, ...]
    names: tuple[PageName, ...]


@dataclass(frozen=True, eq=False)
class Load:
    """Copy pages of these names from their places to pages of the pool."""

    source: PageSource
    places: tuple[int, ...]
    names: tuple[PageName, ...]
    pages: tuple[int, ...]


Edit = Clear | Copy | Gather | Export | Import | Save | Load
Evicted = Callable[[Sequence[tuple[int, bytes]]], Iterable[Edit]]  # pages and their keys: what to do before they go


class Allocator:
    """Pages 1 … total; see the file's picture."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._holders = [0] * (total + 1)
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._edits: list[Edit] = []
        self.on_evicted: Evicted = lambda pages: ()  # where there is a tier below the pool
        self._used: set[int] = set()  # pages that may have memory of their own: those taken since `shrink` gave them up

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def cached_pages(self) -> list[int]:
        """The cached pages, least recently used first."""
        return list(self._cached)

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones and cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.total - self.available

    # -- holding ---------------------------------------------------------------------------------------------------

    def take(self, n: int) -> list[int]:
        """n clean pages with one holder each, or OutOfPages and nothing changed. Cached pages go when they must."""
        if n > self.available:
            raise OutOfPages(
                f"{n} pages are needed and {self.available} of {self.total} are free; release contexts, "
                "or create the engine with a larger pages="
            )
        self.evict(n - len(self._free))
        pages = [self._free.pop() for _ in range(n)]
        self._used.update(pages)
        for page in pages:
            self._holders[page] = 1
            self._edits.append(Clear(page))
        return pages

    def evict(self, n: int) -> None:
        """Free n cached pages, the least recently used first; their contents go to the tier below, if there is one."""
        pages = [(page, self._key_of[page]) for page in islice(self._cached, max(0, n))]
        for page, _ in pages:
            self.forget(page)
        if pages:
            self._edits.extend(self.on_evicted(pages))

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page, held or cached."""
        for page in pages:
            assert self._holders[page] > 0 or page in self._cached
            self._cached.pop(page, None)
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder less for each page; a page without holders is cached if it has a key, else free."""
        for page in reversed(list(pages)):  # so that the first page of a prefix is evicted last
            assert self._holders[page] > 0
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def holders(self, page: int) -> int:
        return self._holders[page]

    # -- the cache -------------------------------------------------------------------------------------------------

    def register(self, page: int, key: bytes) -> None:
        """A held page is full and will not change: others may find it by its key. The first page with a key stays."""
        assert self._holders[page] > 0
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        """The page with this key, if there is one."""
        return self._page_of.get(key)

    def keys(self) -> list[bytes]:
        """The keys of all pages that can be found, held or cached."""
        return list(self._page_of)

    def is_keyed(self, page: int) -> bool:
        return page in self._key_of

    def key_of(self, page: int) -> bytes | None:
        """The key by which a page can be found."""
        return self._key_of.get(page)

    def forget(self, page: int) -> None:
        """Take a page's key away; without holders it is free."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def clear_cache(self) -> int:
        """Forget every key; returns how many pages became free."""
        before = len(self._free)
        for page in list(self._key_of):
            self.forget(page)
        return len(self._free) - before

    def shrink(self, floor: int, most: int) -> list[int]:
        """Free cached pages, the least recently used first, until `floor` are left; at most `most` free pages that have
        been used, whose memory the caller gives back before anybody takes them. No edit may be left to do."""
        assert not self._edits
        while len(self._cached) > floor:
            self.forget(next(iter(self._cached)))
        pages = sorted(self._used.intersection(self._free))[:most]
        self._used.difference_update(pages)
        return pages

    # -- the device's share ----------------------------------------------------------------------------------------

    def edit(self, edit: Edit) -> None:
        """Note work for the device."""
        self._edits.append(edit)

    @property
    def has_edits(self) -> bool:
        return bool(self._edits)

    def take_edits(self) -> tuple[Edit, ...]:
        """The noted device work, in order; the caller has it done before anything else."""
        edits, self._edits = tuple(self._edits), []
        return edits

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that free + cached + held pages are all pages, and that every count equals the tables' holdings."""
        counts = [0] * (self.total + 1)
        for pages in tables:
            for page in pages:
                counts[page] += 1
        assert counts == self._holders, "page holders differ from what the tables hold"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is free and cached"
        idle = {p for p in range(1, self.total + 1) if counts[p] == 0}
        assert free | cached == idle, "free and cached pages are not those without holder"
        assert cached == idle & set(self._key_of), "cached pages are not those with a key and no holder"
        assert {self._page_of[k] for k in self._page_of} == set(self._key_of), "keys and pages do not match"
