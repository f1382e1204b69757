"""The state that a new pass starts from: the context as it is, or as it will be once passes in flight have succeeded.

A value, created under the engine's lock: it owns nothing, changes nothing and reads no results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from headway.base.dataclass import dataclass
from headway.base.specs.brle import Brle
from headway.kv.table import PageTable
from headway.runtime.job import Job


@dataclass(frozen=True, eq=False, slots=True)
class ContextView:
    """A context as a new pass finds it; a pass that takes a token of another one starts after that one."""

    table: PageTable
    ahead: tuple[Job, ...]  # in the order they run
    length: int
    next_position: int
    pending: Sequence[int]
    live: Callable[[int], Brle] | None  # which slots were not discarded; None when all are there

    @classmethod
    def of(cls, table: PageTable, pending: Sequence[int], ahead: Job | None) -> ContextView:
        """The view of a table and its pending tokens, after the pass `ahead`; None when nothing is in flight."""
        live = table.live if table.has_discards else None
        if ahead is None:
            return cls(table, (), table.length, table.next_position, pending, live)
        line = _line(ahead)
        following = [table.next_position, *(max(job.work.positions, default=-1) + 1 for job in line)]
        return cls(table, line, ahead.base + len(ahead.work.tokens), max(following), (), live)

    @property
    def tokens(self) -> Iterator[int]:
        """All tokens, lazily: few passes need them, and a sequence may be long."""
        return chain(self.table.tokens, *(job.work.tokens for job in self.ahead))

    @property
    def positions(self) -> Iterator[int]:
        return chain(self.table.positions, *(job.work.positions for job in self.ahead))


def _line(job: Job) -> tuple[Job, ...]:
    """The passes in flight up to this one, in the order they run."""
    line = [job]
    while (earlier := line[-1].after) is not None:
        line.append(earlier)
    return tuple(reversed(line))
