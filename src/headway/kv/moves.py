"""Moving slots: keeping some slots of a sequence's tail, and putting another sequence's pages after its last slot.

        slots   0 1 2 3 4 5 6 7 8 9
        keep    · · · · 4   6     9     the tail begins at 4: what is before it stays as it is
        after   0 1 2 3 4 6 9           compacted, each with its own position id

A moved slot keeps its contents, so what it attended to does not change. Where all of that is still there, the log says
how the slot came to be in its new place; where it is not, the table notes from which slot on the log does not
(`PageTable.altered`, `partial`), and those pages stay out of the prefix cache. Contents move by edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, OutOfPages, OutOfRange
from headway.base.specs.brle import Brle
from headway.kv.allocator import Gather
from headway.kv.table import Log, PageTable, is_there


@dataclass(frozen=True, eq=False)
class Compaction:
    """The slots `moved` follow the slots before `first`, which stay; `pages` are the numbers of the pages written."""

    first: int
    moved: tuple[int, ...]
    pages: range
    needed: int  # pages that must be free

    @classmethod
    def of(cls, table: PageTable, slots: Sequence[int], start: int) -> Compaction:
        """Keep these slots, in order, of those from `start` on. The table has not changed yet."""
        size, first = table.page_size, start
        for slot in slots:
            if slot != first:
                break
            first += 1
        moved = tuple(slots[first - start :])
        pages = range(first // size, -(-(first + len(moved)) // size)) if moved else range(0)
        plan = cls(first, moved, pages, 0)
        return cls(first, moved, pages, plan._needed(table)) if moved else plan

    def sources(self, number: int, size: int) -> tuple[int, ...]:
        """The slots that make up a page that is written."""
        begin, end = number * size, (number + 1) * size
        kept = tuple(range(begin, min(self.first, end)))
        return kept + self.moved[max(0, begin - self.first) : max(0, end - self.first)]

    def done_with(self, number: int, size: int, pages: int) -> int:
        """The first old page that is still read after the new page `number` was written."""
        left = self.moved[max(0, (number + 1) * size - self.first) :]
        return left[0] // size if left else pages

    def _needed(self, table: PageTable) -> int:
        """Pages that must be free: each new page is written before the old ones that it replaces are given up."""
        allocator, size, freed_to = table.allocator, table.page_size, self.pages.start
        most = balance = 0
        for number in self.pages:
            balance += 1
            most = max(most, balance)
            end = self.done_with(number, size, len(table.pages))
            given_up = [p for p in table.pages[freed_to:end] if is_there(p)]
            balance -= sum(allocator.holders(page) == 1 for page in given_up)
            freed_to = max(freed_to, end)
        return most


def keep_slots(table: PageTable, plan: Compaction, *, exact: bool) -> None:
    """Carry a compaction out. With `exact`, a slot computed elsewhere would not have the same bits."""
    assert not table.is_preempted
    if not plan.moved:
        table.truncate(table.length - plan.first)
        return
    allocator, size, old = table.allocator, table.page_size, table.pages
    if plan.needed > allocator.available:
        raise OutOfPages(
            f"keep_slots needs {plan.needed} free pages for the copies and {allocator.available} of {allocator.total} "
            "are free; release contexts, or keep fewer slots"
        )
    deferred = table.length // size > table.committed
    fresh, freed_to = [], plan.pages.start
    for number in plan.pages:
        (page,) = allocator.take(1)
        fresh.append(page)
        _gather(table, plan.sources(number, size), page, 0)
        end = plan.done_with(number, size, len(old))
        allocator.drop([p for p in old[freed_to:end] if is_there(p)])
        freed_to = max(freed_to, end)
    log, lost, partial = _moved_log(table, plan, exact=exact)
    state = table.state if plan.moved[-1] == table.length - 1 else None
    table.pages = old[: plan.pages.start]
    table.committed = min(table.committed, plan.pages.start)
    del table.keys[table.committed :]
    table.cut_log(plan.first)
    table.alter(lost, partial)
    table.advance(log, fresh, commit=not deferred)
    table.state = state


def _moved_log(table: PageTable, plan: Compaction, *, exact: bool) -> tuple[Log, int | None, list[int]]:
    """The log of the moved slots in their new places, the first of them that it does not explain, and those that
    attended to slots that are gone."""
    first, moved = plan.first, np.array(plan.moved)
    kept = np.zeros(table.length, bool)
    kept[:first] = True
    kept[moved] = True
    ahead = min((start for start, stop in table.spans if stop > first), default=table.length)
    lost, partial, masks = first if exact else None, list[int](), list[Brle | None]()
    for i, slot in enumerate(plan.moved):
        given = table.masks[slot]
        attended = np.ones(slot + 1, bool) if given is None else given.to_bool()
        left = np.concatenate((attended[:first], attended[moved[: i + 1]]))
        gone = (attended[: slot + 1] & ~kept[: slot + 1]).any() or attended[slot + 1 :].any() or slot in table.partial
        if gone:
            partial.append(first + i)
        if (gone or slot >= ahead or table.is_altered(slot)) and lost is None:
            lost = first + i
        masks.append(None if left.all() or not left.any() else Brle.from_bool(left))
    tokens, positions = ([log[slot] for slot in plan.moved] for log in (table.tokens, table.positions))
    adapters = [table.adapters[slot] for slot in plan.moved]
    return Log(tokens, positions, masks, adapters=adapters), lost, partial


def append_pages(table: PageTable, other: PageTable, numbers: Sequence[int], shift: int, *, exact: bool) -> None:
    """Put committed pages of another table after this one's last slot, each slot `shift` positions later.

    Whole pages are shared where they can stay as they are; else their slots are copied.
    """
    assert not table.is_preempted
    assert not other.is_preempted
    size, base = table.page_size, table.length
    slots = [slot for number in numbers for slot in range(number * size, (number + 1) * size)]
    log, lost, partial = _appended_log(table, other, slots, shift, exact=exact)
    deferred = base // size > table.committed
    if is_shareable(table, shift):
        pages = [page for number in numbers if is_there(page := other.pages[number])]
        table.allocator.share(pages)
    else:
        pages = table.allocator.take(table.pages_for(len(slots)))
        at = dict(enumerate([*table.pages, *pages]))
        for number in range(base // size, -(-(base + len(slots)) // size)):
            page, begin = at[number], max(base, number * size)
            assert is_there(page)
            part = slots[begin - base : (number + 1) * size - base]
            _gather(other, part, page, begin % size, shift)
    table.alter(lost, partial)
    table.advance(log, pages, commit=not deferred)
    table.state = None


def is_shareable(table: PageTable, shift: int) -> bool:
    """Whether whole pages can follow this table's last slot without a copy."""
    return shift == 0 and table.committed * table.page_size == table.length and table.working == 0


def _appended_log(
    table: PageTable, other: PageTable, slots: Sequence[int], shift: int, *, exact: bool
) -> tuple[Log, int | None, list[int]]:
    """The log of another table's slots after this one's last, the first of them that it does not explain, and those
    that attended to slots that are not there."""
    base, place = table.length, {slot: i for i, slot in enumerate(slots)}
    ahead = min((start for start, _ in other.spans), default=other.length)
    lost, partial, masks = base if exact or shift else None, list[int](), list[Brle | None]()
    for i, slot in enumerate(slots):
        given = other.masks[slot]
        attended = range(slot + 1) if given is None else np.flatnonzero(given.to_bool()).tolist()
        indices = [place.get(each, len(slots)) for each in attended]
        gone = max(indices) > i or slot in other.partial
        if gone:
            partial.append(base + i)
        if (gone or slot >= ahead or not other.repeatable or other.is_altered(slot)) and lost is None:
            lost = base + i
        left = np.zeros(base + i + 1, bool)
        left[[base + each for each in indices if each <= i]] = True
        masks.append(None if left.all() or not left.any() else Brle.from_bool(left))
    tokens = [other.tokens[slot] for slot in slots]
    positions, adapters = [other.positions[slot] + shift for slot in slots], [other.adapters[slot] for slot in slots]
    return Log(tokens, positions, masks, adapters=adapters), lost, partial


def _gather(table: PageTable, slots: Sequence[int], target: int, start: int, shift: int = 0) -> None:
    """Note that these slots of a table go to a page, from slot `start` of it on."""
    size, pages = table.page_size, list[int]()
    for slot in slots:
        page = table.pages[slot // size]
        assert is_there(page)
        pages.append(page)
    positions = tuple([table.positions[slot] for slot in slots]) if shift else ()
    offsets = tuple([slot % size for slot in slots])
    table.allocator.edit(Gather(tuple(pages), offsets, target, start, positions, shift))


def check_kept(table: PageTable, slots: Sequence[int], start: int) -> None:
    """Raise unless these slots can be kept: in order, in range, none of them discarded."""
    size = table.page_size
    if not slots:
        raise InvalidInput("keep_slots was given no slots; ctx.truncate drops a whole tail")
    for before, slot in pairwise(slots):
        if slot <= before:
            raise InvalidInput(f"keep_slots: slot {slot} follows {before}; give each slot once, in ascending order")
    if slots[0] < 0 or slots[-1] >= table.length:
        wrong = slots[0] if slots[0] < 0 else slots[-1]
        has = f"the context has slots 0 to {table.length - 1}" if table.length else "the context has none"
        raise OutOfRange(f"keep_slots: slot {wrong} is out of range; {has}")
    if start > slots[0]:
        raise InvalidInput(f"keep_slots: slot {slots[0]} lies before the tail, which begins at start={start}")
    gone = next((slot for slot in slots if table.pages[slot // size] is None), None)
    if gone is None and start % size and table.pages[start // size] is None:
        gone = start
    if gone is not None:
        raise InvalidInput(f"keep_slots: slot {gone} was discarded with page {gone // size}; it cannot be kept")
