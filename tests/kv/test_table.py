"""One sequence's pages: every operation, and a random walk in which a stand-in device follows the edits.

The device keeps, for every slot, a number made of everything the slot depends on: salt, token, position and the numbers
of the slots it attended to. So a page that is shared, copied, found by its key or brought back wrongly shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import headway as hw
from headway.base.specs.brle import Brle
from headway.kv.allocator import Allocator, Clear, Copy, Export, Import
from headway.kv.prefix import chain, page_key, root
from headway.kv.table import Log, PageTable
from support.properties import examples

SIZE = 4


def plain(tokens: Sequence[int], first: int = 0) -> Log:
    return Log(tokens, range(first, first + len(tokens)), [None] * len(tokens))


def filled(pool: Allocator, length: int, *, commit: bool = True, salt: str = "") -> PageTable:
    """A table with tokens 0, 1, … at their places."""
    table = PageTable(pool, SIZE, salt)
    table.advance(plain(range(length)), pool.take(table.pages_for(length)), commit=commit)
    return table


# -- counting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "committed", "working"), [(0, 0, 0), (3, 0, 1), (4, 1, 0), (9, 2, 1), (12, 3, 0)])
def test_full_pages_commit_by_themselves(length: int, committed: int, working: int) -> None:
    table = filled(Allocator(8), length)
    assert (table.length, table.committed, table.working) == (length, committed, working)
    assert table.working_tokens == length - committed * SIZE


def test_deferred_pages_stay_working_until_they_are_committed() -> None:
    table = filled(Allocator(8), 10, commit=False)
    assert (table.committed, table.working, table.working_tokens) == (0, 3, 10)
    table.commit(1)
    assert (table.committed, table.working, table.working_tokens) == (1, 2, 6)
    with pytest.raises(hw.InvalidInput, match="1 of 2 working pages are full"):
        table.commit(2)


def test_the_next_position_follows_the_largest_so_far() -> None:
    pool = Allocator(8)
    table = PageTable(pool, SIZE)
    assert table.next_position == 0
    table.advance(Log([1, 1, 1], [5, 40, 7], [None] * 3), pool.take(1), commit=True)
    assert table.next_position == 41
    table.truncate(2)
    assert table.next_position == 6


def test_pages_for_counts_what_reserved_pages_do_not_cover() -> None:
    table = filled(Allocator(8), 6)
    assert [table.pages_for(n) for n in (0, 2, 3, 6, 7)] == [0, 0, 1, 1, 2]
    table.reserve(1)
    assert [table.pages_for(n) for n in (2, 6, 7)] == [0, 0, 1]


# -- page operations -------------------------------------------------------------------------------------------------


def test_released_pages_take_their_tokens_along() -> None:
    pool = Allocator(8)
    table = filled(pool, 10, commit=False)
    table.release(2)
    assert (table.length, len(table.pages), pool.held) == (4, 1, 1)
    assert list(table.tokens) == [0, 1, 2, 3]


def test_truncated_working_pages_stay_reserved() -> None:
    pool = Allocator(8)
    table = filled(pool, 10)
    table.truncate_working(2)
    assert (table.length, table.working, pool.held) == (8, 1, 3)
    with pytest.raises(hw.InvalidInput, match="the working pages hold 0 tokens"):
        table.truncate_working(1)


def test_a_cut_between_pages_copies_nothing() -> None:
    pool = Allocator(8)
    table = filled(pool, 12)
    pool.take_edits()
    table.truncate(4)
    assert (table.length, table.committed, table.working, pool.held) == (8, 2, 0, 2)
    assert pool.take_edits() == ()


def test_a_cut_inside_a_committed_page_copies_what_is_kept() -> None:
    pool = Allocator(8)
    table = filled(pool, 12)
    before = table.held()
    pool.take_edits()
    table.truncate(6)
    assert (table.length, table.committed, table.working) == (6, 1, 1)
    fresh = table.held()[1]
    assert pool.take_edits() == (Clear(fresh), Copy(before[1], fresh, 2), Clear(fresh, 2))


def test_a_cut_inside_a_committed_page_leaves_a_fork_as_it_was() -> None:
    pool = Allocator(8)
    table = filled(pool, 8)
    twin = table.fork()
    table.truncate(3)
    assert (twin.length, twin.committed) == (8, 2)
    assert twin.held()[0] == table.held()[0]
    assert twin.held()[1] != table.held()[1]


def test_without_a_free_page_a_shared_page_is_cut_and_computed_again_later() -> None:
    pool = Allocator(2)
    table = filled(pool, 8)
    twin = table.fork()
    table.truncate(3)
    assert table.is_preempted
    assert table.absent() == [1]
    assert not twin.is_preempted


def test_without_a_free_page_a_shared_page_that_cannot_be_computed_again_is_not_cut() -> None:
    pool = Allocator(2)
    table = PageTable(pool, SIZE)
    table.advance(Log(range(8), range(8), [None] * 8, ahead=2), pool.take(2), commit=True)
    twin = table.fork()
    with pytest.raises(hw.OutOfPages, match="truncate keeps 3 slots of a shared page"):
        table.truncate(1)
    assert (table.length, table.committed, twin.length) == (8, 2, 8)


def test_discarded_pages_are_free_and_everything_keeps_its_number() -> None:
    pool = Allocator(8)
    table = filled(pool, 14)
    table.discard(1, 2)
    assert (table.length, table.committed, len(table.pages), pool.held) == (14, 3, 4, 2)
    assert table.pages[1] is table.pages[2] is None
    assert table.live(14).to_bool().tolist() == [True] * 4 + [False] * 8 + [True] * 2


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda t: t.reserve(-1), hw.InvalidInput, "-1"),
        (lambda t: t.reserve(True), hw.WrongType, "True"),
        (lambda t: t.reserve(6), hw.OutOfPages, "6 pages are needed and 5 of 8"),
        (lambda t: t.commit(1), hw.InvalidInput, "0 of 1 working pages are full"),
        (lambda t: t.release(2), hw.InvalidInput, "there are 1 working pages"),
        (lambda t: t.truncate_working(3), hw.InvalidInput, "hold 2 tokens"),
        (lambda t: t.discard(0, 3), hw.OutOfRange, "pages 0 to 1 are full"),
        (lambda t: t.discard(-1, 1), hw.InvalidInput, "the first page is -1"),
        (lambda t: t.discard(1.0, 1), hw.WrongType, r"the first page is 1\.0"),
    ],
)
def test_misuse_raises_and_changes_nothing(act: Callable[[PageTable], None], error: type[Exception], says: str) -> None:
    pool = Allocator(8)
    table = filled(pool, 10)
    before = (list(table.pages), table.committed, table.length, list(table.tokens), pool.take_edits())
    with pytest.raises(error, match=says):
        act(table)
    assert (list(table.pages), table.committed, table.length, list(table.tokens)) == before[:4]
    assert pool.take_edits() == ()


def test_the_last_full_page_can_be_discarded_and_a_page_that_is_gone_or_not_full_cannot() -> None:
    table = filled(Allocator(8), 9)
    with pytest.raises(hw.OutOfRange, match="pages 0 to 1"):
        table.discard(2, 1)
    table.discard(1, 1)
    table.discard(0, 1)
    with pytest.raises(hw.InvalidInput, match="page 0 was discarded before"):
        table.discard(0, 1)


def test_a_cut_inside_a_discarded_page_is_refused() -> None:
    table = filled(Allocator(8), 12)
    table.discard(1, 1)
    with pytest.raises(hw.InvalidInput, match="inside page 1"):
        table.truncate(6)
    table.truncate(8)
    assert (table.length, table.pages.count(None)) == (4, 0)


# -- forks -----------------------------------------------------------------------------------------------------------


def test_a_fork_shares_committed_pages_and_copies_working_ones_that_have_tokens() -> None:
    pool = Allocator(8)
    table = filled(pool, 10)
    table.reserve(1)
    pool.take_edits()
    twin = table.fork()
    assert twin.held()[:2] == table.held()[:2]
    assert len(twin.pages) == 3  # the reserved page does not come along
    copied = twin.held()[2]
    assert pool.take_edits() == (Clear(copied), Copy(table.held()[2], copied, 2))
    assert pool.held == 5
    table.close()
    assert (pool.held, twin.length, list(twin.tokens)) == (3, 10, list(range(10)))


def test_a_fork_takes_bid_deadline_and_budget_along() -> None:
    table = filled(Allocator(8), 3)
    table.bid, table.deadline, table.token_budget = 3.0, 1e9, 17
    twin = table.fork()
    assert (twin.bid, twin.deadline, twin.token_budget) == (3.0, 1e9, 17)
    assert twin.born > table.born


def test_a_fork_without_free_pages_computes_its_working_slots_again() -> None:
    pool = Allocator(2)
    twin = filled(pool, 6).fork()
    assert twin.absent() == [1]


def test_closing_twice_gives_pages_back_once() -> None:
    pool = Allocator(4)
    table = filled(pool, 5)
    table.close()
    table.close()
    assert pool.held == 0
    pool.check([])


# -- keys ------------------------------------------------------------------------------------------------------------


def keys_of(log: Log, *, salt: str = "", commit: bool = True) -> list[bytes | None]:
    pool = Allocator(8)
    table = PageTable(pool, SIZE, salt)
    table.advance(log, pool.take(table.pages_for(len(log.tokens))), commit=commit)
    return table.keys


def test_a_key_covers_salt_tokens_positions_masks_and_all_before() -> None:
    base = plain(range(8))
    same, (first, second) = keys_of(base), keys_of(base)
    assert same == [first, second]
    assert first != second
    assert keys_of(base, salt="a")[0] != first
    assert keys_of(plain([9, *range(1, 8)])) != same
    early = keys_of(plain([9, *range(1, 8)]))
    assert early[1] != second  # the same second page after another first one
    assert keys_of(Log(range(8), [0, 1, 2, 3, 4, 5, 6, 8], [None] * 8))[0] == first
    assert keys_of(Log(range(8), [0, 1, 2, 3, 4, 5, 6, 8], [None] * 8))[1] != second
    masks = [None] * 7 + [Brle.from_intervals(8, [(3, 8)])]
    assert keys_of(Log(range(8), range(8), masks)) != same


def test_a_page_filled_token_by_token_has_the_key_of_one_filled_at_once() -> None:
    pool = Allocator(8)
    table = PageTable(pool, SIZE)
    for n in range(8):
        table.advance(plain([n], n), pool.take(table.pages_for(1)), commit=True)
    assert table.keys == keys_of(plain(range(8)))


def test_keys_of_many_pages_are_those_of_each_page_after_the_other() -> None:
    tokens, before, keys = tuple(range(7, 60)), root("salt"), []
    for start in range(0, 48, 16):
        page = slice(start, start + 16)
        before = page_key(before, tokens[page], range(100)[page], ())
        keys.append(before)
    assert chain(root("salt"), tokens, range(len(tokens)), None, 16) == keys
    assert chain(root("salt"), list(tokens), list(range(len(tokens))), (None,) * len(tokens), 16) == keys


def test_pages_of_a_pass_that_is_not_causal_and_all_after_them_have_no_keys() -> None:
    pool = Allocator(8)
    table = filled(pool, 4)
    table.advance(Log(range(4), range(4, 8), [None] * 4, ahead=2), pool.take(1), commit=True)
    table.advance(plain(range(4), 8), pool.take(1), commit=True)
    assert [k is None for k in table.keys] == [False, True, True]
    assert pool.is_keyed(table.held()[0])
    assert not any(pool.is_keyed(p) for p in table.held()[1:])


def test_a_cut_into_such_a_pass_is_forgotten_once_all_of_it_is_cut() -> None:
    pool = Allocator(8)
    table = filled(pool, 4)
    table.advance(Log(range(4), range(4, 8), [None] * 4, ahead=4), pool.take(1), commit=True)
    table.truncate(2)
    assert not table.repeatable
    table.truncate(2)
    assert table.can_replay
    table.advance(plain(range(4), 4), pool.take(1), commit=True)
    assert all(pool.is_keyed(p) for p in table.held())


def test_a_deferred_page_has_no_key_before_it_is_committed() -> None:
    pool = Allocator(8)
    table = filled(pool, 8, commit=False)
    assert not any(pool.is_keyed(p) for p in table.held())
    table.commit(2)
    assert all(pool.is_keyed(p) for p in table.held())


# -- undoing and setting aside ---------------------------------------------------------------------------------------


def test_pages_that_an_undone_pass_committed_are_working_pages_that_nobody_finds() -> None:
    pool = Allocator(9)
    table = PageTable(pool, SIZE)
    table.advance(plain(range(2 * SIZE)), pool.take(2), commit=False)
    mark = table.mark()
    table.advance(plain([1], 2 * SIZE), pool.take(1), commit=True)
    shared = next(p for p in table.pages if p)
    pool.share([shared])  # by somebody who has found it meanwhile
    table.rewind(mark)
    assert (table.committed, table.working) == (0, 2)
    assert shared not in table.pages
    assert pool.is_keyed(shared)
    assert not any(pool.is_keyed(p) for p in table.held())
    pool.check([table.held(), [shared]])


@pytest.mark.parametrize("start", [0, 3, 4, 6])
@pytest.mark.parametrize("more", [1, 2, 7])
def test_a_pass_is_undone_without_a_trace(start: int, more: int) -> None:
    pool = Allocator(8)
    table = filled(pool, start)
    before = (list(table.pages), table.committed, table.length, list(table.keys), table.stamp)
    mark = table.mark()
    table.advance(plain(range(more), start), pool.take(table.pages_for(more)), commit=True)
    table.rewind(mark)
    assert (list(table.pages), table.committed, table.length, list(table.keys), table.stamp) == before
    assert not any(pool.is_keyed(p) for p in table.held()[table.committed :])
    pool.check([table.held()])


def test_a_table_that_can_be_computed_again_gives_its_pages_up_without_a_copy() -> None:
    pool = Allocator(4)
    table = filled(pool, 10)
    pool.take_edits()
    table.preempt()
    assert (table.is_preempted, table.host, pool.take_edits()) == (True, None, ())
    assert (pool.held, pool.cached, pool.free) == (0, 2, 2)


def test_a_table_with_deferred_pages_recovers_from_its_log() -> None:
    """Its pages are spoilt, or the copy in host memory that it was to come back from."""
    pool = Allocator(8)
    spoilt, uncopied = filled(pool, 10, commit=False), filled(pool, 10, commit=False)
    uncopied.preempt()
    pool.take_edits()
    for table in (spoilt, uncopied):
        table.recover(None, "stuck")
        assert (table.lost, table.absent(), table.host) == (None, [0, 1, 2], None)
    assert (pool.held, pool.take_edits()) == (0, ())


@pytest.mark.parametrize("why", ["discard", "not causal", "deferred"])
def test_a_table_that_cannot_is_copied_to_host_memory_and_back(why: str) -> None:
    pool = Allocator(8)
    table = filled(pool, 10, commit=why != "deferred")
    if why == "discard":
        table.discard(0, 1)
    if why == "not causal":
        table.advance(Log([1, 2], [10, 11], [None] * 2, ahead=2), (), commit=True)
    assert not table.can_replay
    held = table.held()
    pool.take_edits()
    table.preempt()
    (export,) = pool.take_edits()
    assert isinstance(export, Export)
    assert (export.pages, export.target) == (tuple(held), table.host)
    assert pool.held == 0
    pages = pool.take(len(table.absent()))
    host = table.host
    table.resume(pages)
    (imported,) = [edit for edit in pool.take_edits() if isinstance(edit, Import)]
    assert (imported.source, imported.places, imported.pages) == (host, tuple(range(len(pages))), tuple(pages))
    assert not table.is_preempted
    assert table.held() == pages


def test_of_a_table_in_host_memory_only_what_a_cut_leaves_comes_back() -> None:
    pool = Allocator(8)
    table = filled(pool, 11, commit=False)
    table.preempt()
    table.truncate(6)
    pages = pool.take(len(table.absent()))
    pool.take_edits()
    table.resume(pages)
    back, wiped = pool.take_edits()  # what was cut off is in the copy, and goes
    assert isinstance(back, Import)
    assert (len(pages), back.places, back.pages) == (2, (0, 1), tuple(pages))
    assert wiped == Clear(pages[1], 1)


def test_a_copy_in_host_memory_that_a_cut_leaves_nothing_of_is_forgotten() -> None:
    """It must not be taken for what is computed later in the same places."""
    pool = Allocator(8)
    table = filled(pool, 11, commit=False)
    table.preempt()
    table.truncate(11)
    assert table.host is None
    table.advance(plain([5, 6]), pool.take(1), commit=True)
    table.preempt()
    assert (table.is_preempted, table.host) == (True, None)


def test_what_lies_after_the_end_is_zeroed() -> None:
    """In the page of the last token and in all that are reserved after it, and nowhere else."""
    pool = Allocator(8)
    table = filled(pool, 10, commit=False)
    pool.take_edits()
    table.truncate_working(5)
    assert pool.take_edits() == (Clear(table.held()[1], 1), Clear(table.held()[2], 0))


# -- a random walk ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Twin:
    table: PageTable
    cells: list[int] = field(default_factory=list)  # what each slot must hold


class Device:
    """Follows edits, as the pool does."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}

    def apply(self, pool: Allocator) -> None:
        for edit in pool.take_edits():
            match edit:
                case Clear(page, start):
                    self.pages[page] = [*self.pages.get(page, [])[:start], *[0] * (SIZE - start)]
                case Copy(source, target, slots):
                    self.pages[target][:slots] = self.pages[source][:slots]
                case Export(pages, target):
                    target.data = [list(self.pages[p]) for p in pages]
                case Import(source, places, pages):
                    assert isinstance(source.data, list)
                    for place, page in zip(places, pages, strict=True):
                        self.pages[page] = list(source.data[place])

    def write(self, pages: Sequence[int | None], slot: int, cell: int) -> None:
        page = pages[slot // SIZE]
        assert page is not None
        self.pages[page][slot % SIZE] = cell


def computed(table: PageTable, log: Log, cells: list[int]) -> list[int]:
    """What the slots of a log hold, after the cells before them."""
    cells = list(cells)
    base = len(cells)
    causal = len(log.tokens) - log.ahead
    for i, (token, position, mask) in enumerate(zip(log.tokens, log.positions, log.masks, strict=True)):
        seen = range(len(cells)) if mask is None else [s for s in range(len(cells)) if mask.to_bool()[s]]
        ahead = () if i < causal else tuple(log.tokens[causal:])
        cells.append(hash((table.salt, token, position, len(cells), tuple(cells[s] for s in seen), ahead)))
    return cells[base:]


OPERATIONS = {
    "opens": 1,
    "computes": 12,
    "reserves": 1,
    "commits": 2,
    "releases": 1,
    "truncates": 3,
    "discards": 2,
    "forks": 4,
    "sets_aside": 4,
    "brings_back": 6,
    "closes": 1,
}


class Walk(RuleBasedStateMachine):
    """Tables in a small pool; contents are checked after every operation."""

    @initialize(total=st.sampled_from([3, 6, 6, 16]))
    def start(self, total: int) -> None:
        self.pool, self.device = Allocator(total), Device()
        self.twins = [Twin(PageTable(self.pool, SIZE))]
        self.known: dict[bytes, list[int]] = {}  # what was ever under a key

    @rule(
        name=st.sampled_from([name for name, weight in OPERATIONS.items() for _ in range(weight)]),
        which=st.integers(0, 9),
        data=st.data(),
    )
    def acts(self, name: str, which: int, data: st.DataObject) -> None:
        if name == "opens" or not self.twins:
            return self.opens(data.draw(st.sampled_from(["", "", "a"])))
        twin = self.twins[which % len(self.twins)]
        here = not twin.table.is_preempted
        match name:
            case "computes" if here:
                tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
                how = data.draw(st.sampled_from(["plain", "plain", "plain", "ahead", "deferred", "undone"]))
                self.computes(twin, tokens, data.draw(st.sampled_from([None, None, 2])), how)
            case "reserves" | "releases" | "truncates" | "commits":
                getattr(self, name)(twin, data.draw(st.integers(0, 2 if name != "truncates" else len(twin.cells))))
            case "discards" if here:
                self.discards(twin, data.draw(st.integers(0, 3)))
            case "forks" | "sets_aside" | "brings_back" | "closes":
                getattr(self, name)(twin)

    def opens(self, salt: str) -> None:
        if len(self.twins) < 5:
            self.twins.append(Twin(PageTable(self.pool, SIZE, salt)))

    def computes(self, twin: Twin, tokens: list[int], window: int | None, how: str) -> None:
        table, base = twin.table, twin.table.length
        if table.pages_for(len(tokens)) > self.pool.available:
            return
        masks: list[Brle | None] = []
        for slot in range(base, base + len(tokens)):
            mask = None if window is None else Brle.from_intervals(slot + 1, [(max(0, slot - window), slot + 1)])
            if table.has_discards:
                live = table.live(slot + 1)
                mask = live if mask is None else mask & live
            masks.append(mask)
        first, ahead = table.next_position, min(3, len(tokens)) if how == "ahead" else 0
        log = Log(tokens, range(first, first + len(tokens)), masks, ahead=ahead)
        pages = self.pool.take(table.pages_for(len(tokens)))
        self.device.apply(self.pool)
        new = computed(table, log, twin.cells)
        for slot, cell in enumerate(new, base):
            self.device.write([*table.pages, *pages], slot, cell)
        mark = table.mark()
        table.advance(log, pages, commit=how != "deferred")
        if how == "undone":
            table.rewind(mark)
        else:
            twin.cells += new

    def reserves(self, twin: Twin, n: int) -> None:
        if n <= self.pool.available:
            twin.table.reserve(n)

    def commits(self, twin: Twin, k: int) -> None:
        if k <= twin.table.length // SIZE - twin.table.committed and not twin.table.is_preempted:
            twin.table.commit(k)

    def releases(self, twin: Twin, n: int) -> None:
        if n <= twin.table.working:
            twin.table.release(n)
            del twin.cells[twin.table.length :]

    def truncates(self, twin: Twin, drop: int) -> None:
        try:
            twin.table.truncate(drop)
        except hw.OutOfPages:
            assert self.pool.available == 0
        except hw.InvalidInput:
            assert twin.table.has_discards
        else:
            del twin.cells[len(twin.cells) - drop :]

    def discards(self, twin: Twin, start: int) -> None:
        table = twin.table
        if start < max(table.length - 1, 0) // SIZE and table.pages[start] is not None:
            table.discard(start, 1)

    def forks(self, twin: Twin) -> None:
        if len(self.twins) >= 5:
            return
        try:
            self.twins.append(Twin(twin.table.fork(), list(twin.cells)))
        except hw.OutOfPages:
            assert not twin.table.can_replay

    def sets_aside(self, twin: Twin) -> None:
        if twin.table.held():
            twin.table.preempt()

    def brings_back(self, twin: Twin) -> None:
        table, numbers, kept = twin.table, twin.table.absent(), twin.table.host is not None
        if not numbers or len(numbers) > self.pool.available:
            return
        table.resume(self.pool.take(len(numbers)))
        self.device.apply(self.pool)
        if not kept:  # what the log says must be what was there
            assert table.can_replay
            again = computed(table, Log(table.tokens, table.positions, table.masks), [])
            for slot in range(table.length):
                if slot // SIZE in numbers:
                    self.device.write(table.pages, slot, again[slot])

    def closes(self, twin: Twin) -> None:
        self.twins.remove(twin)
        twin.table.close()

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.device.apply(self.pool)
        self.pool.check([t.table.held() for t in self.twins])
        for twin in self.twins:
            table = twin.table
            assert len(table.tokens) == len(table.positions) == len(table.masks) == table.length == len(twin.cells)
            assert len(table.keys) == table.committed <= table.length // SIZE
            assert len(table.pages) >= -(-table.length // SIZE)
            for slot, cell in enumerate(twin.cells):
                page = table.pages[slot // SIZE]
                if page:
                    assert self.device.pages[page][slot % SIZE] == cell

    @invariant()
    def a_key_leads_to_what_it_stands_for(self) -> None:
        for twin in getattr(self, "twins", []):
            for number, key in enumerate(twin.table.keys):
                if key is not None:
                    cells = twin.cells[number * SIZE : (number + 1) * SIZE]
                    assert self.known.setdefault(key, cells) == cells
        for key, cells in getattr(self, "known", {}).items():
            page = self.pool.find(key)
            assert page is None or self.device.pages[page] == cells


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestWalkLong(Walk.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80, deadline=None)
