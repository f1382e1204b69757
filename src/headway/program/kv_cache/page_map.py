"""Who holds which pages, for monitors: every page of an engine, or those of one context.

Values, copied under the engine's lock: they own no page, and a page may have changed hands by the time they are read.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from headway.base.dataclass import dataclass

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.engine import Engine


class PageState(IntEnum):
    """What a page of the KV cache is used for."""

    FREE = 0
    CACHED = 1  # held by no context, kept by the prefix cache
    WORKING = 2
    COMMITTED = 3
    SHARED = 4  # held by several contexts


@dataclass(frozen=True, repr=False)
class PageMap:
    """The state of every page of an engine: that of page p, counted from 1, is `states[p - 1]`."""

    states: tuple[PageState, ...]
    contexts: int  # that hold at least one page
    queued: int  # passes that wait

    def __repr__(self) -> str:
        counts = Counter(state.name.lower() for state in self.states)
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"<PageMap: {listed}; {self.contexts} contexts, {self.queued} queued>"


@dataclass(frozen=True)
class ContextPage:
    """One page of a context; `page` is None where it has no place in the KV cache."""

    page: int | None
    state: Literal["working", "committed", "discarded", "preempted"]
    holders: int


def map_pages(engine: Engine) -> PageMap:
    """The state of every page. Copies under the engine's lock, counts without it."""
    with engine._lock:
        engine._loop.drain()
        tables = [(list(table.held()), list(table.pages), table.committed) for table in engine._loop.kv_cache.tables]
        cached, total = engine._allocator.cached_pages(), engine._allocator.total
        queued = engine._loop.waiting()
    states = [PageState.FREE] * (total + 1)
    for page in cached:
        states[page] = PageState.CACHED
    holders = Counter(page for held, _, _ in tables for page in held)
    for _, pages, committed in tables:
        for number, page in enumerate(pages):
            if page:  # neither discarded nor preempted
                own = PageState.COMMITTED if number < committed else PageState.WORKING
                states[page] = PageState.SHARED if holders[page] > 1 else own
    return PageMap(tuple(states[1:]), sum(bool(held) for held, _, _ in tables), queued)


def pages_of(context: Context) -> tuple[ContextPage, ...]:
    """The pages of a context, in the order of its slots."""
    engine, table = context.engine, context._table
    with engine._lock:
        return tuple(_page(engine, page, number < table.committed) for number, page in enumerate(table.pages))


def _page(engine: Engine, page: int | None, committed: bool) -> ContextPage:
    if page is None:
        return ContextPage(None, "discarded", 0)
    if page == 0:
        return ContextPage(None, "preempted", 0)
    return ContextPage(page, "committed" if committed else "working", engine._allocator.holders(page))
