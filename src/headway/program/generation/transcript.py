"""What a generation has appended to its prompt: tokens, and the constraint and text that follow them.

It knows nothing of passes and never changes a context: it is given the context's tokens, and follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headway.base.errors import InvalidInput
from headway.program.checks.ids import common
from headway.program.constraints.constraint import Constraint
from headway.program.generation.constrained import GenerationConstraint
from headway.program.generation.stops import StopText

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.engine import Engine


class Transcript:
    """The tokens after a prompt, each generated or written by the program, and everything that depends on them."""

    def __init__(self, engine: Engine, stops: tuple[str, ...], rule: GenerationConstraint) -> None:
        self.rule = rule
        self.generated: list[int] = []
        self._prompt: tuple[int, ...] = ()
        self._text_start = 0  # where the text begins that the generated tokens continue
        self._tail: list[tuple[int, bool]] = []  # tokens after the prompt, each with whether it was generated
        self._settled: list[tuple[int, bool]] = []  # those before them whose slots were moved: they are not cut
        self._base: tuple[int, ...] | None = None  # the context's tokens then; None: the prompt
        self._text = StopText(engine, stops)
        self._lost = 0  # characters returned that no longer stand

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._text.stopped

    @property
    def has_stops(self) -> bool:
        """Whether a stop string may end the text."""
        return self._text.has_stops

    @property
    def constraint(self) -> Constraint | None:
        """What follows the text, once its grammar is compiled."""
        return self.rule.active

    # -- growing ---------------------------------------------------------------------------------------------------

    def add(self, token: int, *, accepted: bool = False) -> None:
        """One more generated token; the constraint may have accepted it already."""
        if self.constraint is not None and not accepted:
            self.constraint.accept(token)
        self.generated.append(token)
        self._tail.append((token, True))
        self._text.push(token)

    @contextmanager
    def adding(self, ids: list[int], *, whole: bool, before_end: bool = False) -> Iterator[list[int]]:
        """Several more generated tokens, up to a stop string. With `whole`, a stop string before the last token is
        refused; with `before_end`, when an end token follows, one at the last token too.

        Yields the tokens that are taken; nothing has changed if the constraint refuses one or the caller fails.
        """
        text, count = self._text.copy(), 0
        try:
            for token in ids:
                if text.stopped:
                    break
                if self.constraint is not None:
                    self.constraint.accept(token)
                count += 1
                text.push(token)
            more = len(ids) - count + (before_end and text.stopped)
            if whole and more:
                raise InvalidInput(f"the first {count} tokens end in a stop string and {more} follow it")
            yield ids[:count]
        except BaseException:
            if self.constraint is not None:
                self.constraint.rollback(count)
            raise
        self._text = text
        self._count(ids[:count])

    def _count(self, tokens: list[int]) -> None:
        self.generated += tokens
        self._tail += [(token, True) for token in tokens]

    # -- going back ------------------------------------------------------------------------------------------------

    def begin(self, tokens: tuple[int, ...], text_start: int = 0) -> None:
        """These tokens are the prompt; the text that goes on begins at one of them."""
        self._prompt, self._text_start = tokens, text_start
        self._text.begin(tokens[text_start:])

    def settle(self, tokens: tuple[int, ...]) -> None:
        """Slots were moved and these tokens are left in the context: none of what was generated is cut."""
        self._settled, self._tail, self._base = [*self._settled, *self._tail], [], tokens

    def follow(self, tokens: tuple[int, ...], cut: int | None = None) -> None:
        """Take over the context's tokens: what was cut is forgotten, what is new was written by the program.

        `cut` is the fewest tokens that the context had meanwhile: those after them are new, even if they are the same.
        """
        before = self._before
        mine = (*before, *(token for token, _ in self._tail))
        kept = common(tokens, mine) if cut is None else min(cut, common(tokens, mine))
        if kept == len(tokens) == len(mine):
            return
        base = len(before)
        if kept >= base:
            tail = [*self._tail[: kept - base], *((token, False) for token in tokens[kept:])]
        elif self._base is None:
            self._prompt, tail = tokens, []
        else:
            self._base, tail = tokens, []
        left = [token for token, generated in (*self._settled, *tail) if generated]
        if self.constraint is not None and len(left) < len(self.generated):
            self.constraint.rollback(len(self.generated) - len(left))
        self._tail, self.generated = tail, left
        self.reopen()

    @property
    def _before(self) -> tuple[int, ...]:
        """The context's tokens before those that can be cut."""
        return self._prompt if self._base is None else self._base

    def lacks_last(self, tokens: tuple[int, ...]) -> bool:
        """Whether these are all tokens except the last one, which was generated."""
        last = self._tail[-1:]
        return [generated for _, generated in last] == [True] and tokens == (
            *self._before,
            *(token for token, _ in self._tail[:-1]),
        )

    def stop(self) -> int:
        """Forget the tokens that hold any part of the stop string; returns how many of them the context has."""
        surplus = self.surplus
        if self.constraint is not None:
            self.constraint.rollback(surplus)
        del self.generated[len(self.generated) - surplus :]
        there = min(surplus, len(self._tail))
        del self._tail[len(self._tail) - there :]
        del self._settled[len(self._settled) - (surplus - there) :]
        return there

    @property
    def surplus(self) -> int:
        """How many tokens hold any part of the stop string."""
        return self._text.surplus()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._text.stop_string

    def fork(self, context: Context | None = None) -> Transcript:
        """An independent copy, for a fork of the context or for the same one."""
        twin = object.__new__(Transcript)
        twin.__dict__.update(self.__dict__)
        twin.rule = self.rule.fork(context)
        twin.generated, twin._tail, twin._text = list(self.generated), list(self._tail), self._text.copy()
        twin._settled = list(self._settled)
        return twin

    # -- text ------------------------------------------------------------------------------------------------------

    def take_text(self) -> tuple[str, int]:
        """The text that became certain, and how many characters at the end of what was returned no longer stand."""
        lost, self._lost = self._lost, 0
        return self._text.take(), lost

    def close(self) -> None:
        """No token will follow: text that was held back is certain."""
        self._text.close()

    def reopen(self) -> None:
        """Tokens will follow after all."""
        self._text, lost = self._text.again(self._prompt[self._text_start :], [*self._settled, *self._tail])
        self._lost += lost

    def whole(self) -> str:
        """All text that was returned and stands."""
        return self._text.whole()
