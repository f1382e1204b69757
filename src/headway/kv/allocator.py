"""Which pages are free and how often each is held. Pure bookkeeping; the engine's lock guards it.

Page 0 is never handed out: it stays zero, and stands for "no page" wherever a tensor needs a number. Handing a page
out or copying one also needs work on the device; it is noted as an edit, in order, and done before the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.base.errors import OutOfPages


@dataclass(frozen=True)
class Clear:
    """Zero a page that got a new owner."""

    page: int


@dataclass(frozen=True)
class Copy:
    """Copy the first slots of a page to another."""

    source: int
    target: int
    slots: int


Edit = Clear | Copy


class Allocator:
    """Pages 1 … total with a count of holders each."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._holders = [0] * (total + 1)
        self._edits: list[Edit] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.total - len(self._free)

    def take(self, n: int) -> list[int]:
        """n clean pages with one holder each, or OutOfPages and nothing changed."""
        if n > len(self._free):
            raise OutOfPages(
                f"{n} pages are needed and {len(self._free)} of {self.total} are free; release contexts, "
                "or create the engine with a larger pages="
            )
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
            self._edits.append(Clear(page))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            assert self._holders[page] > 0
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder less for each page; a page without holders is free."""
        for page in pages:
            assert self._holders[page] > 0
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def copy(self, source: int, target: int, slots: int) -> None:
        """Note a copy for the device."""
        self._edits.append(Copy(source, target, slots))

    def take_edits(self) -> tuple[Edit, ...]:
        """The noted device work, in order; the caller has it done before anything else."""
        edits, self._edits = tuple(self._edits), []
        return edits

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that free + held pages are all pages, and that every count equals the tables' holdings."""
        counts = [0] * (self.total + 1)
        for pages in tables:
            for page in pages:
                counts[page] += 1
        assert counts == self._holders, "page holders differ from what the tables hold"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free == {p for p in range(1, self.total + 1) if counts[p] == 0}, (
            "free pages are not those without holder"
        )
