"""The constraint of one generation: what a program gave as `constrain=`, and `no_repeat_ngram_size`, as one constraint.

A `Grammar` is compiled before the first pass that needs it: in the caller's thread, or without blocking its event loop.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from typing import TYPE_CHECKING

from headway.base.errors import Unsupported
from headway.program.constraints.budget import GrammarBudget, Postponed, settle
from headway.program.constraints.constraint import Constraint, GrammarMatcher, compile_async, innermost
from headway.program.constraints.constraint import compile as compile_grammar
from headway.program.constraints.grammar import Grammar
from headway.program.generation.ngrams import NoRepeat

if TYPE_CHECKING:
    from headway.program.context import Context


class GenerationConstraint:
    """`active` follows the text; it is None while nothing constrains the tokens."""

    def __init__(self, context: Context, constrain: Grammar | Constraint | None, no_repeat_ngram_size: int = 0) -> None:
        self._engine = context.engine
        self._grammar = constrain if isinstance(constrain, Grammar) else None  # until it is compiled
        given = None if isinstance(constrain, Grammar) else constrain
        self._no_repeat = NoRepeat(no_repeat_ngram_size, context, given) if no_repeat_ngram_size else None
        self.active: Constraint | None = given if self._no_repeat is None else self._no_repeat

    @property
    def is_given(self) -> bool:
        """Whether the program has given a constraint."""
        given = self.active if self._no_repeat is None else self._no_repeat.other
        return given is not None or self._grammar is not None

    @property
    def is_grammar(self) -> bool:
        """Whether it is or has a compiled grammar, or something slow: what follows a token may take long."""
        return isinstance(self._inner, GrammarMatcher) or self.is_slow

    @property
    def is_slow(self) -> bool:
        """Whether it has a grammar that is slow to follow."""
        return bool(getattr(self._inner, "is_slow", False))

    @property
    def _inner(self) -> object:
        return innermost(self.active)

    @property
    def finished(self) -> bool:
        """Whether it allows nothing but the end."""
        return self.active is not None and bool(getattr(self.active, "finished", False))

    @property
    def runs_ahead(self) -> bool:
        """Whether it is a program's own, and may be followed in a thread of the engine's."""
        own = self.active is not None and self._inner is self.active and not self.is_grammar
        return own and not getattr(self.active, "in_program", False)

    def is_over(self, *, last: bool) -> bool:
        """The same; after the `last` token, a grammar is not asked for a mask that nobody needs: a text that is not
        complete is not over."""
        with suppress(Postponed), self.hurrying():
            if last and isinstance(self._inner, GrammarMatcher) and not self.may_end:
                return False
            return self.finished
        return False  # the next step will tell

    @property
    def may_end(self) -> bool:
        """Whether the text may end here."""
        return bool(getattr(self.active, "may_end", True))

    def forced(self) -> list[int]:
        """Tokens of the only text that can follow."""
        return getattr(self.active, "forced", list)()

    def follow(self, grammar: Grammar) -> None:
        """Follow this grammar, where the program has given no other."""
        assert not self.is_given
        self._grammar = grammar

    def compile(self) -> None:
        """Compile the grammar, if it is not. The first time it may take a second, in the caller's thread."""
        if self._grammar is not None:
            engine = self._engine
            self._compiled(compile_grammar(self._grammar, engine.tokenizer, engine.vocab_size, budget=self._budget()))

    async def compile_async(self) -> None:
        """The same without blocking the event loop."""
        if (grammar := self._grammar) is not None:
            engine = self._engine
            compiled = await compile_async(grammar, engine.tokenizer, engine.vocab_size, budget=self._budget())
            if self._grammar is grammar:  # else somebody needed it sooner
                self._compiled(compiled)

    def _budget(self) -> GrammarBudget:
        return GrammarBudget(self._engine._max_grammar_seconds)

    def _compiled(self, constraint: Constraint) -> None:
        self._grammar = None
        if self._no_repeat is None:
            self.active = constraint
        else:
            self._no_repeat.other = constraint

    async def settle(self) -> None:
        """Have what a grammar allows next computed, in a thread if it is slow, before anybody here asks for it."""
        inner = self._inner
        if isinstance(inner, GrammarMatcher) and not inner.is_slow:
            with inner.hurrying():
                inner.settle()
        if self.is_slow:
            await settle(inner)

    def hurrying(self) -> AbstractContextManager[None]:
        """While a grammar is asked in an event loop, where others wait."""
        inner = self._inner
        return inner.hurrying() if isinstance(inner, GrammarMatcher) else nullcontext()

    def reread(self) -> None:
        """Tokens come that nobody sampled: what must not repeat is read from the context again."""
        if self._no_repeat is not None:
            self._no_repeat.stale = True

    def fork(self, context: Context | None = None) -> GenerationConstraint:
        """An independent copy in the same state, for a fork of the context or for the same one."""
        twin = copy(self)
        if self.active is not None:
            copied = getattr(self.active, "copy", None)
            if copied is None:
                raise Unsupported(
                    f"the constraint {type(self.active).__name__} has no copy(), so this generation cannot be forked; "
                    "give it one that returns a constraint in the same state"
                )
            twin.active = copied()
        if isinstance(twin.active, NoRepeat):
            twin._no_repeat = twin.active
            if context is not None:
                twin.active.context = context
        return twin
