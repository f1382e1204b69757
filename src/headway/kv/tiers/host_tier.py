"""Which pages are kept in host memory, and where. Pure bookkeeping; the engine's lock guards it.

        pool ──evicted: Save──▶ kept ──least recently used──▶ dropped, or to the folder
        pool ◀──found: Load──── kept

Pages are kept by their keys. Contents move by edits, in order, so a place may be given to another page at once: what is
noted later is done later. A page that came back to the pool stays here too, and need not be copied when it leaves
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headway.kv.allocator import Load, Save
from headway.kv.tiers.page_store import PageName, PageStore, pages_at_once


class HostTier:
    """Places 0 … total - 1; see the file's picture."""

    def __init__(self, store: PageStore, total: int) -> None:
        self.store, self.total = store, total
        self.at_once = pages_at_once(store.memory.page_bytes, total)  # pages of one edit, at most
        self._free = list(range(total - 1, -1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.saved = self.loaded = self.dropped = 0

    @property
    def pages(self) -> int:
        """Pages that are kept now."""
        return len(self._kept)

    def has(self, key: bytes) -> bool:
        """Whether the page of a key is kept."""
        return key in self._kept

    def keep(self, pages: Sequence[tuple[int, bytes]]) -> list[Save]:
        """Keep evicted pages, in the order of eviction; the copies to be made before the pages are used again."""
        self._forget_failed()
        edits: list[Save] = []
        chosen: dict[int, tuple[int, bytes]] = {}  # by place
        for page, key in pages:
            if key in self._kept:
                self._kept.move_to_end(key)
                continue
            place = self._place()
            if place is None:
                self.dropped += 1
                continue
            if place in chosen or len(chosen) == self.at_once:
                edits.append(self._save(chosen))
                chosen = {}
            chosen[place] = page, key
            self._kept[key] = place
        if chosen:
            edits.append(self._save(chosen))
        return edits

    def _save(self, chosen: dict[int, tuple[int, bytes]]) -> Save:
        self.saved += len(chosen)
        names = tuple(self._name(key) for _, key in chosen.values())
        return Save(tuple(page for page, _ in chosen.values()), self.store, tuple(chosen), names)

    def _place(self) -> int | None:
        """A place for another page; None while all are lent."""
        if self._free:
            return self._free.pop()
        return self._kept.popitem(last=False)[1] if self._kept else None

    @contextmanager
    def lent(self, keys: Sequence[bytes]) -> Iterator[list[int]]:
        """The places of these pages, which are all kept; none of them is given away meanwhile, and then they are those
        used last, the first page of a prefix after all others."""
        places = [self._kept.pop(key) for key in keys]
        try:
            yield places
        finally:
            self._kept.update(zip(reversed(keys), reversed(places), strict=True))

    def load(self, keys: Sequence[bytes], places: Sequence[int], pages: Sequence[int]) -> list[Load]:
        """The copies that bring these pages back, to pages of the pool."""
        self.loaded += len(keys)
        edits = []
        for first in range(0, len(keys), self.at_once):
            part = slice(first, first + self.at_once)
            names = tuple(self._name(key) for key in keys[part])
            edits.append(Load(self.store, tuple(places[part]), names, tuple(pages[part])))
        return edits

    def forget(self, key: bytes) -> None:
        """A page is not, or no longer, what its key says."""
        place = self._kept.pop(key, None)
        if place is not None:
            self._free.append(place)

    def clear(self) -> None:
        """Drop everything."""
        self._free.extend(self._kept.values())
        self._kept.clear()
        self.store.generation += 1

    def _forget_failed(self) -> None:
        """Pages that the worker could not write."""
        failed = self.store.failed
        while failed:
            name = failed.popleft()
            if name.generation == self.store.generation:
                self.forget(name.key)

    def _name(self, key: bytes) -> PageName:
        return PageName(key, self.store.generation)

    def check(self) -> None:
        """Assert that every place is free or has one page."""
        assert sorted([*self._free, *self._kept.values()]) == list(range(self.total)), (
            "a place is lost, or has two pages"
        )
