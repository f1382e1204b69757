"""A context as its generation last left it, to notice what the program has done to it since."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.program.context import Context


class LastSeen:
    """`mark` stays equal as long as nobody changes the context; `cut` is the fewest tokens that it has had since."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.mark: object = None  # None before the first step
        self.cut: int | None = None  # None: no tokens were cut

    @property
    def has_begun(self) -> bool:
        return self.mark is not None

    @property
    def is_current(self) -> bool:
        """Whether it looks as it did then. Tokens that were cut and written again look the same: see `cut`."""
        return self.mark == self.now()

    def now(self) -> object:
        """The mark of the context as it is."""
        with self._context.engine._lock:
            pending = self._context.pending  # first: it takes back what another generation has in flight
            return self._context._table.stamp, pending

    def update(self) -> None:
        """The context is as its generation has left it."""
        self.mark, self.cut = self.now(), None

    def invalidate(self) -> None:
        """Somebody has changed the context, whatever it looks like."""
        self.mark = ()

    def was_cut(self, length: int) -> None:
        """The context was cut to `length` tokens: those after them were not generated, whatever they are."""
        self.cut = length if self.cut is None else min(self.cut, length)

    def fork(self, context: Context) -> LastSeen:
        """The same for a fork of the context, made just now."""
        twin = copy(self)
        twin._context = context
        if self.has_begun:
            twin.mark = twin.now()
        return twin
