"""`no_repeat_ngram_size`: no run of n tokens comes twice, as in `transformers`.

`NoRepeat` is a constraint over all tokens of a context, the prompt included, combined with another constraint that a
program may give. `Unrepeating` is a generation under it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, Unsupported
from headway.base.samplers import Sampler
from headway.program.constraints.budget import GrammarBudget, is_slow
from headway.program.constraints.constraint import Constraint, compile_async
from headway.program.constraints.constraint import compile as compile_grammar
from headway.program.constraints.grammar import Grammar
from headway.program.generation.generator import Generation
from headway.program.generation.steps import Prepared, Step
from headway.program.generation.stops import parse_json

if TYPE_CHECKING:
    from headway.program.context import Context


def banned_by_ngrams(tokens: Sequence[int], n: int) -> set[int]:
    """The tokens that would complete a run of n tokens that `tokens` has already; none for n = 0."""
    n = check_integer(n, "n")
    if n == 0 or len(tokens) < n:
        return set()
    last = tuple(tokens[len(tokens) - n + 1 :])
    runs = (tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1))
    return {run[-1] for run in runs if run[:-1] == last}


def copied(constraint: Any) -> Any:
    """An independent copy of a constraint; a `Grammar` is a value and its own copy."""
    if constraint is None or isinstance(constraint, Grammar):
        return constraint
    if not hasattr(constraint, "copy"):
        raise Unsupported(f"{type(constraint).__name__} has no copy(), so two texts cannot follow it; give it one")
    return constraint.copy()


class NoRepeat:
    """Allows the tokens that repeat no run of n tokens of its context and that `other` allows.

    It reads the context, not only the tokens it accepted: those that a program writes between two steps count too. A
    `Grammar` is compiled when it is first needed; `prepare` does so in a thread.
    """

    def __init__(self, n: int, context: Context, other: Grammar | Constraint | None = None) -> None:
        self._n, self.context, self.other = check_integer(n, "no_repeat_ngram_size", low=1), context, other
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], Counter[int]] = {}  # n - 1 tokens → those that came next
        self.stale = True  # the context may have changed
        self._accepted = 0  # tokens since it was read
        self.twin: NoRepeat | None = None  # the last copy

    async def prepare(self) -> None:
        """Compile the other constraint in a thread, if it is a grammar."""
        if isinstance(grammar := self.other, Grammar):
            engine = self.context.engine
            matcher = await compile_async(
                grammar, engine.tokenizer, engine.vocab_size, budget=GrammarBudget(engine._max_grammar_seconds)
            )
            if self.other is grammar:  # else it was needed sooner
                self.other = matcher

    def mask(self) -> np.ndarray | None:
        self._sync()
        other = self._compiled()
        allowed = None if other is None else other.mask()
        if not (banned := self._banned()):
            return allowed
        words = _all_but(banned, self.context.engine.vocab_size)
        both = words if allowed is None else words & allowed
        if not both.any():
            where = "" if allowed is None else " that the constraint allows"
            raise InvalidInput(f"no_repeat_ngram_size={self._n} forbids every token{where} here; give a larger one")
        return both

    def accept(self, token: int) -> None:
        if self.stale:
            self._sync()
        if token in self._banned():
            raise InvalidInput(f"token {token} would repeat a run of {self._n} tokens (no_repeat_ngram_size)")
        if (other := self._compiled()) is not None:
            other.accept(token)
        self._push(token)
        self._accepted += 1

    def rollback(self, n: int) -> None:
        if (other := self._compiled()) is not None:
            other.rollback(n)
        if self.stale or n > self._accepted:
            self.stale = True
        else:
            self._drop(n)
            self._accepted -= n

    def copy(self) -> NoRepeat:
        self.twin = NoRepeat(self._n, self.context, copied(self.other))
        return self.twin

    def forced(self) -> list[int]:
        """The other constraint's forced tokens, until one would repeat a run."""
        self._sync()
        tokens, kept = getattr(self._compiled(), "forced", list)(), 0
        for token in tokens:
            if token in self._banned():
                break
            self._push(token)
            kept += 1
        self._drop(kept)
        return tokens[:kept]

    @property
    def may_end(self) -> bool:
        return getattr(self._compiled(), "may_end", True)

    @property
    def finished(self) -> bool:
        return getattr(self._compiled(), "finished", False)

    @property
    def is_slow(self) -> bool:
        return is_slow(self.other)

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """In a thread: it touches nothing but the other constraint."""
        other: Any = self.other
        other.settle(is_wanted)

    def _compiled(self) -> Constraint | None:
        if isinstance(self.other, Grammar):
            engine = self.context.engine
            self.other = compile_grammar(
                self.other, engine.tokenizer, engine.vocab_size, budget=GrammarBudget(engine._max_grammar_seconds)
            )
        return self.other

    def _sync(self) -> None:
        """Read the context's tokens, unless it has all but those accepted last: drafts."""
        tokens, own = self.context.tokens, tuple(self._tokens)
        if not self.stale and tokens == own[: len(own) - self._accepted]:
            return
        self.stale, self._accepted = False, 0
        if tokens[: len(own)] != own:
            own = own[: next(i for i, token in enumerate(own) if tokens[i : i + 1] != (token,))]
            self._drop(len(self._tokens) - len(own))
        for token in tokens[len(own) :]:
            self._push(token)

    def _banned(self) -> Counter[int]:
        return self._next.get(self._last(), Counter())

    def _last(self) -> tuple[int, ...]:
        return tuple(self._tokens[max(0, len(self._tokens) - self._n + 1) :])

    def _push(self, token: int) -> None:
        if len(self._tokens) >= self._n - 1:
            self._next.setdefault(self._last(), Counter())[token] += 1
        self._tokens.append(token)

    def _drop(self, n: int) -> None:
        for _ in range(n):
            token = self._tokens.pop()
            if len(self._tokens) >= self._n - 1:
                counts = self._next[self._last()]
                counts[token] -= 1
                if not counts[token]:
                    del counts[token]


def _all_but(banned: Iterable[int], vocab: int) -> np.ndarray:
    """A packed mask of all tokens but these."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[:vocab] = 1
    bits[sorted(banned)] = 0
    return np.packbits(bits, bitorder="little").view(np.uint32)


class Unrepeating(Generation):
    """A generation under `NoRepeat` and any other constraint."""

    def __init__(
        self, context: Context, sampler: Sampler, n: int, *, constrain: Grammar | Constraint | None, **options: Any
    ) -> None:
        self._rule = NoRepeat(n, context, constrain)
        super().__init__(context, sampler, constrain=self._rule, **options)

    async def __anext__(self) -> Step:
        await self._rule.prepare()
        return await super().__anext__()

    async def prepare(self) -> Prepared:
        await self._rule.prepare()
        return await super().prepare()

    def accept(self, tokens: Iterable[int]) -> Step:
        self._rule.stale = True
        return super().accept(tokens)

    async def json(self, schema: Any = None) -> Any:
        if schema is not None:
            if self.generated or self._rule.other is not None:
                raise InvalidInput("a schema can be given to json() before the first step, and to no other constraint")
            self._rule.other = Grammar.json_schema(schema)
        return parse_json(await self.text(), self.finish, schema)

    def fork(self, *, seed: int | None = None) -> Generation:
        twin = super().fork(seed=seed)
        assert isinstance(twin, Unrepeating)
        assert self._rule.twin is not None
        twin._rule, self._rule.twin = self._rule.twin, None
        twin._rule.context = twin.context
        return twin
