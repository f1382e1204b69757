"""Pages free, held and cached: the rules one by one, then a random walk beside a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import headway as hw
from headway.kv.allocator import Allocator, Clear, Copy
from support.properties import examples


def key(n: int) -> bytes:
    return n.to_bytes(4, "little")


def cached_pages(pool: Allocator, count: int) -> list[int]:
    """Pages that nobody holds, with the keys 0, 1, …, cached one after another."""
    pages = pool.take(count)
    for n, page in enumerate(pages):
        pool.register(page, key(n))
    for page in pages:
        pool.drop([page])
    return pages


def test_pages_are_handed_out_once_and_never_page_0() -> None:
    pool = Allocator(5)
    pages = pool.take(5)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert (pool.free, pool.held, pool.available) == (0, 5, 0)


def test_a_page_that_is_handed_out_is_cleared_first() -> None:
    pool = Allocator(5)
    first = pool.take(2)
    pool.edit(Copy(first[0], first[1], 3))
    second = pool.take(1)
    assert pool.take_edits() == (*(Clear(p) for p in first), Copy(first[0], first[1], 3), Clear(second[0]))
    assert pool.take_edits() == ()


def test_too_many_pages_are_refused_with_the_numbers_and_nothing_changes() -> None:
    pool = Allocator(4)
    pool.take(3)
    pool.take_edits()
    with pytest.raises(hw.OutOfPages, match=r"2 pages are needed and 1 of 4 are free"):
        pool.take(2)
    assert (pool.free, pool.held) == (1, 3)
    assert pool.take_edits() == ()


def test_a_page_is_free_when_its_last_holder_leaves() -> None:
    pool = Allocator(2)
    (page,) = pool.take(1)
    pool.share([page])
    assert pool.holders(page) == 2
    pool.drop([page])
    assert (pool.free, pool.held) == (1, 1)
    pool.drop([page])
    assert (pool.free, pool.held, pool.holders(page)) == (2, 0, 0)


def test_a_page_with_a_key_stays_findable_without_holders_and_can_be_held_again() -> None:
    pool = Allocator(2)
    (page,) = cached_pages(pool, 1)
    assert (pool.free, pool.cached, pool.held, pool.available) == (1, 1, 0, 2)
    assert pool.find(key(0)) == page
    pool.share([page])
    assert (pool.free, pool.cached, pool.held) == (1, 0, 1)


def test_cached_pages_go_only_when_free_ones_are_gone_and_the_least_recently_used_first() -> None:
    pool = Allocator(5)
    pages = cached_pages(pool, 3)
    pool.share([pages[0]])
    pool.drop([pages[0]])  # used again: now the newest
    pool.take(2)
    assert pool.cached == 3
    assert pool.take(1) == [pages[1]]
    assert [pool.find(key(n)) for n in range(3)] == [pages[0], None, pages[2]]
    assert [pool.take(1)[0] for _ in range(2)] == [pages[2], pages[0]]


def test_of_a_prefix_the_last_page_is_evicted_first() -> None:
    pool = Allocator(3)
    pages = pool.take(3)
    for n, page in enumerate(pages):
        pool.register(page, key(n))
    pool.drop(pages)
    assert [pool.take(1)[0] for _ in pages] == pages[::-1]


def test_the_first_page_with_a_key_keeps_it() -> None:
    pool = Allocator(3)
    first, second = pool.take(2)
    pool.register(first, key(0))
    pool.register(second, key(0))
    pool.register(first, key(1))
    assert pool.find(key(0)) == first
    assert pool.find(key(1)) is None
    assert not pool.is_keyed(second)
    pool.drop([second])
    assert (pool.free, pool.cached) == (2, 0)


def test_a_forgotten_page_is_found_no_more() -> None:
    pool = Allocator(3)
    held, cached = pool.take(2)
    pool.register(held, key(0))
    pool.register(cached, key(1))
    pool.drop([cached])
    pool.forget(held)
    pool.forget(cached)
    assert pool.find(key(0)) is None
    assert pool.find(key(1)) is None
    assert (pool.free, pool.cached, pool.held) == (2, 0, 1)


def test_clearing_frees_cached_pages_and_forgets_held_ones() -> None:
    pool = Allocator(6)
    cached_pages(pool, 2)
    (held,) = pool.take(1)
    pool.register(held, key(7))
    assert pool.clear_cache() == 2
    assert (pool.free, pool.cached, pool.held) == (5, 0, 1)
    assert pool.find(key(7)) is None


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pool, held, cached: pool.share([held]), "holders"),
        (lambda pool, held, cached: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool, held, cached: pool._free.append(cached), "free and cached"),
        (lambda pool, held, cached: pool._free.pop(), "without holder"),
        (lambda pool, held, cached: pool._key_of.pop(cached), "with a key"),
        (lambda pool, held, cached: pool._page_of.clear(), "do not match"),
    ],
)
def test_the_check_finds_what_does_not_add_up(spoil: object, says: str) -> None:
    pool = Allocator(5)
    (cached,) = cached_pages(pool, 1)
    (held,) = pool.take(1)
    pool.check([[held]])
    assert callable(spoil)
    spoil(pool, held, cached)
    with pytest.raises(AssertionError, match=says):
        pool.check([[held]])


class Pages(RuleBasedStateMachine):
    """A model in lists: who holds what, which key is where, who was used last."""

    @initialize(total=st.integers(1, 8))
    def start(self, total: int) -> None:
        self.pool = Allocator(total)
        self.holdings: list[list[int]] = []
        self.keys: dict[int, int] = {}  # key → page
        self.cached: list[int] = []  # least recently used first
        self.total = total

    def count(self, page: int) -> int:
        return sum(h.count(page) for h in self.holdings)

    @rule(n=st.integers(0, 5))
    def takes(self, n: int) -> None:
        idle = self.total - len({p for h in self.holdings for p in h})
        if n > idle:
            with pytest.raises(hw.OutOfPages):
                self.pool.take(n)
            return
        free = idle - len(self.cached)
        evicted = self.cached[: max(0, n - free)]
        pages = self.pool.take(n)
        del self.cached[: len(evicted)]
        self.keys = {k: p for k, p in self.keys.items() if p not in evicted}
        assert not any(self.count(p) for p in pages)
        assert not set(pages) & set(self.cached)
        self.holdings.append(pages)

    @rule(which=st.integers(0, 9))
    def drops(self, which: int) -> None:
        if self.holdings:
            pages = self.holdings.pop(which % len(self.holdings))
            self.pool.drop(pages)
            keyed = set(self.keys.values())
            self.cached += [p for p in reversed(pages) if not self.count(p) and p in keyed]

    @rule(which=st.integers(0, 9))
    def shares(self, which: int) -> None:
        if self.holdings:
            pages = list(self.holdings[which % len(self.holdings)])
            self.pool.share(pages)
            self.holdings.append(pages)

    @rule(k=st.integers(0, 5))
    def finds(self, k: int) -> None:
        assert self.pool.find(key(k)) == self.keys.get(k)
        if k in self.keys:
            page = self.keys[k]
            self.pool.share([page])
            self.holdings.append([page])
            self.cached = [p for p in self.cached if p != page]

    @rule(which=st.integers(0, 9), at=st.integers(0, 9), k=st.integers(0, 5))
    def registers(self, which: int, at: int, k: int) -> None:
        held = [p for h in self.holdings for p in h]
        if held:
            page = held[(which * 10 + at) % len(held)]
            self.pool.register(page, key(k))
            if k not in self.keys and page not in self.keys.values():
                self.keys[k] = page

    @rule(page=st.integers(1, 8))
    def forgets(self, page: int) -> None:
        if page <= self.total:
            self.pool.forget(page)
            self.keys = {k: p for k, p in self.keys.items() if p != page}
            self.cached = [p for p in self.cached if p != page]

    @rule()
    def clears(self) -> None:
        assert self.pool.clear_cache() == len(self.cached)
        self.keys, self.cached = {}, []

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.holdings)
        held = len({p for h in self.holdings for p in h})
        assert (self.pool.held, self.pool.cached) == (held, len(self.cached))
        assert self.pool.free == self.total - held - len(self.cached)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
