"""The raw operations on the KV-cache pages of a context."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, OutOfPages, OutOfRange, Unsupported, WrongType
from headway.base.text import short_repr
from headway.kv.moves import Compaction, append_pages, check_kept, is_shareable, keep_slots
from headway.program.checks.ids import check_position, integers
from headway.program.kv_cache.page_map import ContextPage, pages_of

if TYPE_CHECKING:
    from headway.program.context import Context


class RawPages:
    """Pages by hand: reserve, commit, release, roll back, discard, move. Misuse raises and changes nothing."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __repr__(self) -> str:
        return f"<RawPages: {self.committed_page_count} committed, {self.working_page_count} working>"

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
        """Free n full pages from page number `start` on; no later row can attend to them."""
        start, n = check_integer(start, "the first page"), check_integer(n, "the number of pages")
        self._check_can_move("discard_pages")
        while True:
            self._context._settle()  # a preempted context resumes first
            with self._context._changing():
                if not self._context._table.is_preempted:
                    return self._context._table.discard(start, n)

    def keep_slots(self, slots: Iterable[int], start: int | None = None) -> None:
        """Keep these slots of the sequence's tail, compacted, each with its position; memory of the others is freed.

        The tail begins at slot `start`, by default at the first slot given: what is before it stays. Slots are numbered
        anew, `seq_len` and `ctx.tokens` count those that stay, and empty working pages are given back. A row that comes
        later attends to the slots that stay; they themselves do not change.
        """
        chosen = integers(slots, "slots")
        self._check_can_move("keep_slots")
        if start is None:
            start = chosen[0] if chosen else 0
        start = check_integer(start, "start")
        context = self._context
        while True:
            context._settle()
            with context._changing():
                table = context._table
                if table.is_preempted:
                    continue
                check_kept(table, chosen, start)
                plan = Compaction.of(table, chosen, start)
                context.engine._loop.make_room(plan.needed, table)
                with context._moving(start, chosen):
                    keep_slots(table, plan, exact=context.engine.deterministic)
                return

    def append_from(self, other: Context, pages: Iterable[int], shift: int = 0) -> None:
        """Put committed pages of another context after this one's last slot, in the order given, `shift` positions on.

            ctx.inner().append_from(module, range(3))

        The slots keep what they attended to in the other context; rows that come later attend to them as to any. They
        are shared, not copied, where they fall on whole pages and stay at their positions.
        """
        context = self._context
        chosen, (shift,) = integers(pages, "pages"), integers([shift], "shift")
        _check_other(context, other)
        self._check_can_move("append_from")
        if shift and not context.engine.capabilities.shift_pages:
            raise Unsupported(
                f"append_from: shift is {shift}, and a {context.engine.config.family} model learned its positions; "
                "only 0 is possible"
            )
        while True:
            context._settle()
            other._settle()
            with ExitStack() as locked:
                for each in (context, other):
                    locked.enter_context(each._changing())
                table, source = context._table, other._table
                if table.is_preempted or source.is_preempted:
                    continue
                if context.pending:
                    raise InvalidInput(
                        f"append_from: this context has {len(context.pending)} pending tokens, which come first; "
                        "compute them with flush(), or truncate them"
                    )
                size, limit = context.page_size, context.engine.config.max_positions
                for number in chosen:
                    if not 0 <= number < source.committed or source.pages[number] is None:
                        state = "was discarded" if 0 <= number < source.committed else "is not committed"
                        raise OutOfRange(
                            f"append_from: page {number} of the other context {state}; it has {source.committed} "
                            "committed pages, and only these can be appended"
                        )
                    for slot in range(number * size, (number + 1) * size):
                        check_position(source.positions[slot] + shift, limit, f"the position of slot {slot}, shifted,")
                needed = 0 if is_shareable(table, shift) else table.pages_for(len(chosen) * size)
                if not context.engine._loop.make_room(needed, table, source):
                    available, total = table.allocator.available, table.allocator.total
                    raise OutOfPages(
                        f"append_from needs {needed} pages for the copies and {available} of {total} are free; release "
                        "contexts, or append at a page's border without a shift, which copies nothing"
                    )
                append_pages(table, source, chosen, shift, exact=context.engine.deterministic)
                return

    def _check_can_move(self, verb: str) -> None:
        engine = self._context.engine
        if not engine.capabilities.move_slots:
            raise Unsupported(
                f"{verb}: a {engine.config.family} model has recurrent layers, whose state is that of all slots in "
                "their order; truncate the context, or fork it earlier"
            )


def _check_other(context: Context, other: object) -> None:
    if not isinstance(other, type(context)):
        raise WrongType(f"append_from was given {short_repr(other)}; it must be another context")
    if other is context:
        raise InvalidInput("append_from was given this context itself; fork it, and give the fork")
    if other.engine is not context.engine:
        raise InvalidInput("append_from was given a context of another engine, whose pages are elsewhere")
