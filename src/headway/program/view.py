"""A context as a new pass finds it: as it is, or as it will be when the passes in flight have succeeded.

A value, made under the engine's lock: it owns nothing, changes nothing and never looks at a pass's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from headway.base.brle import Brle
from headway.kv.table import PageTable
from headway.runtime.job import Job


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """A context as a new pass finds it: behind the passes in flight, when it takes the last one's token."""

    table: PageTable
    ahead: tuple[Job, ...]  # in the order they run
    length: int
    next_position: int
    pending: Sequence[int]
    live: Callable[[int], Brle] | None  # which slots were not discarded; None when all are there

    @classmethod
    def of(cls, table: PageTable, pending: Sequence[int], ahead: Job | None) -> View:
        """Of a table and the tokens that wait for it, behind the pass `ahead`; None: nothing is in flight."""
        live = table.live if table.has_discards else None
        if ahead is None:
            return cls(table, (), table.length, table.next_position, pending, live)
        line = _line(ahead)
        following = [table.next_position, *(max(job.work.positions, default=-1) + 1 for job in line)]
        return cls(table, line, ahead.base + len(ahead.work.tokens), max(following), (), live)

    @property
    def tokens(self) -> Iterator[int]:
        """All of them. Few passes look, and a sequence may be long."""
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
