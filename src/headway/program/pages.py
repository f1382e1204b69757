"""The raw operations on the KV-cache pages of a context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.base.checks import check_integer
from headway.program.page_map import ContextPage, pages_of

if TYPE_CHECKING:
    from headway.program.context import Context


class RawPages:
    """Pages by hand: reserve, commit, release, roll back, discard. Misuse raises and changes nothing."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def page_size(self) -> int:
        return self._context.page_size

    @property
    def pages(self) -> tuple[ContextPage, ...]:
        """Its pages in the order of its slots: where each is, its state, and how many contexts hold it."""
        return pages_of(self._context)

    @property
    def committed_page_count(self) -> int:
        """Full, immutable pages, discarded ones included."""
        return self._context._table.committed

    @property
    def working_page_count(self) -> int:
        return self._context._table.working

    @property
    def working_page_token_count(self) -> int:
        """Tokens in working pages."""
        return self._context._table.working_tokens

    def reserve_working_pages(self, n: int) -> None:
        """Add n empty working pages, or raise when the pool cannot supply them now."""
        n = check_integer(n, "the number of pages")
        with self._context._changing():
            self._context._table.reserve(n)

    def commit_working_pages(self, k: int) -> None:
        """Make the first k working pages immutable and shared by forks; each must be full."""
        k = check_integer(k, "the number of pages")
        with self._context._changing():
            self._context._table.commit(k)

    def release_working_pages(self, n: int) -> None:
        """Free the last n working pages, and drop the tokens in them."""
        n = check_integer(n, "the number of pages")
        with self._context._changing():
            self._context._table.release(n)

    def truncate_working_page_tokens(self, n: int) -> None:
        """Drop the last n computed tokens, which must lie in working pages."""
        n = check_integer(n, "the number of tokens")
        with self._context._changing():
            self._context._table.truncate_working(n)

    def discard_pages(self, start: int, n: int) -> None:
        """Free n full pages from page number `start` on, leading or middle; no later row can attend to them."""
        start, n = check_integer(start, "the first page"), check_integer(n, "the number of pages")
        while True:
            self._context._settle()  # a preempted context resumes first
            with self._context._changing():
                if not self._context._table.is_preempted:
                    return self._context._table.discard(start, n)
