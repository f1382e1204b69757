"""Edits of pages on a device that may fail: what is done, and what is damaged when one fails.

An edit that fails must not take other contexts with it, so it is found by doing each again alone. That is safe while
no edit reads a page that a later one may have written already: edits are done in runs of which this is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, PassFailed, RankLost
from headway.kv.allocator import Clear, Copy, Edit, Export, Gather, HostPages, Import, Load, Save


@dataclass(eq=False)
class Damage:
    """What edits that failed have left: pages and host copies whose contents are not to be trusted, and why."""

    pages: dict[int, HeadwayError] = field(default_factory=dict)
    hosts: dict[HostPages, HeadwayError] = field(default_factory=dict)
    sources: dict[int, HostPages] = field(default_factory=dict)  # where what belongs in a page still is
    misses: set[HeadwayError] = field(default_factory=set)  # of pages that no tier has: they can be computed instead

    def __bool__(self) -> bool:
        return bool(self.pages or self.hosts)

    def of(self, pages: Sequence[int], host: HostPages | None = None) -> HeadwayError | None:
        """Why one of these is damaged; None if none is."""
        if host is not None and host in self.hosts:
            return self.hosts[host]
        return next((self.pages[p] for p in pages if p in self.pages), None)

    @property
    def first(self) -> HeadwayError:
        """Why the first damaged page is damaged."""
        return next(iter([*self.pages.values(), *self.hosts.values()]))

    def add(self, edit: Edit, error: HeadwayError) -> None:
        """An edit was not done."""
        if isinstance(edit, Export):
            self.hosts[edit.target] = error
        if isinstance(edit, Load):
            self.misses.add(error)
        for page in _written(edit):
            self.pages[page] = error
            if isinstance(edit, Import):
                self.sources[page] = edit.source

    def mended(self, edit: Edit) -> None:
        """An edit was done, and says all that is in its pages."""
        if isinstance(edit, Import | Load) or (isinstance(edit, Clear) and edit.start == 0):
            for page in _written(edit):
                self.pages.pop(page, None)
                self.sources.pop(page, None)


def carry_out(edits: Sequence[Edit], do: Callable[[tuple[Edit, ...]], None]) -> Damage:
    """Have all edits done, in order; what fails is in the damage, and what builds on it."""
    damage = Damage()
    for run in runs(edits):
        if not damage:
            try:
                do(run)
                continue
            except RankLost:
                raise
            except Exception:
                pass  # which of them it was shows below
        for edit in run:
            error = damage.of(_read(edit), edit.source if isinstance(edit, Import) else None) or _attempt(edit, do)
            if error is None:
                damage.mended(edit)
            else:
                damage.add(edit, error)
    return damage


def _attempt(edit: Edit, do: Callable[[tuple[Edit, ...]], None]) -> HeadwayError | None:
    try:
        do((edit,))
    except RankLost:
        raise
    except Exception as e:
        return PassFailed(f"the device failed while preparing pages ({type(edit).__name__.lower()}): {e}")
    return None


def runs(edits: Sequence[Edit]) -> Iterator[tuple[Edit, ...]]:
    """The edits in order, cut wherever one writes a page that an earlier one of its run reads."""
    run: list[Edit] = []
    read: set[int] = set()
    for edit in edits:
        if read and not read.isdisjoint(_written(edit)):
            yield tuple(run)
            run, read = [], set()
        run.append(edit)
        read.update(_read(edit))
    if run:
        yield tuple(run)


def _read(edit: Edit) -> tuple[int, ...]:
    match edit:
        case Clear():
            return ()
        case Copy(source):
            return (source,)
        case Gather(pages):
            return pages
        case Export(pages) | Save(pages):
            return pages
    return ()


def _written(edit: Edit) -> tuple[int, ...]:
    match edit:
        case Clear(page):
            return (page,)
        case Copy(_, target):
            return (target,)
        case Gather(target=target):
            return (target,)
        case Import(_, _, pages) | Load(_, _, _, pages):
            return pages
    return ()
