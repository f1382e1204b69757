"""Drafters: what proposes the tokens that a generation then verifies, and the checks of what they propose.

A drafter can only cost time, never change a text: see `verify.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.program.checks.ids import integers

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

VERIFY = ("match", "rejection")
MAX_DRAFT = 64  # tokens of one draft at most


@dataclass(frozen=True, eq=False)
class Draft:
    """Tokens that may come next, as a line or as a tree.

        Draft([5, 9, 2])                          # 5, then 9, then 2
        Draft([5, 9, 7, 2], parents=[-1, 0, -1, 2])   # 5 9 or 7 2

    `parents[i]` is the index of the draft that token i follows, below i; -1 is the sequence's last token. Acceptance is
    measured for every `kind` of draft by itself, so that a drafter can tell its good guesses from others; `chance` is
    how likely each token is, given those before it, until it is measured.
    `probabilities[i]` is the distribution [V] that token i was drawn from, for `verify="rejection"`; without it the
    token counts as the drafter's only choice.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    probabilities: Sequence[np.ndarray] | None = None
    kind: int = 0
    chance: float = 0.7

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_line(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents is None or all(parent == i - 1 for i, parent in enumerate(self.parents))

    def cut(self, length: int) -> Draft:
        """The first tokens of it."""
        if length >= len(self.tokens):
            return self
        parents = None if self.parents is None else self.parents[:length]
        chances = None if self.probabilities is None else self.probabilities[:length]
        return replace(self, tokens=self.tokens[:length], parents=parents, probabilities=chances)


Drafted = Draft | Iterable[int]  # what `draft` returns


@runtime_checkable
class Drafter(Protocol):
    """What `ctx.generate(speculate=...)` takes.

    With a method `copy()` that returns a fresh drafter, one object can be given to many generations: each has a copy of
    its own, and a new one whenever its program changes the context by hand. Without, it serves one sequence. With an
    attribute `adaptive = False` all that it drafts is verified, whether it pays or not.
    """

    def draft(self, tokens: Sequence[int], limit: int) -> Drafted | Awaitable[Drafted]:
        """At most `limit` tokens that may follow `tokens`, the whole sequence so far; none where it has no guess.

        It may be async. A plain function must be quick: it is also called to see whether a draft would have been right.
        The engine's worker calls it too, in its own thread, while the generation waits and nobody else calls it.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """What was added to the sequence since the last call: at first all of it, the prompt included."""
        ...


class TokenView(Sequence[int]):
    """The tokens of a sequence, to be read only; a slice of it is a tuple."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return tuple(self._tokens[at]) if isinstance(at, slice) else self._tokens[at]

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"


def check_drafter(drafter: object, verify: object) -> None:
    """Raise unless `generate` can speculate with it, and verify like that."""
    if not isinstance(verify, str) or verify not in VERIFY:
        raise InvalidInput(f"verify is {short_repr(verify)}; it must be {' or '.join(map(repr, VERIFY))}")
    if drafter is None:
        if verify != VERIFY[0]:
            raise InvalidInput(f"verify={verify!r} has no effect without drafts; give speculate too")
        return
    if isinstance(drafter, type) or not isinstance(drafter, Drafter):
        raise WrongType(
            f"speculate is {short_repr(drafter)}; give PromptLookup(), DraftModel(engine), OwnLayers(n), or an object "
            "with draft(tokens, limit) and accept(tokens)"
        )


def copied_drafter(drafter: Any) -> Any:
    """Another drafter of the same kind, for another sequence."""
    if not hasattr(drafter, "copy"):
        raise Unsupported(
            f"the drafter {type(drafter).__name__} has no copy(), so it serves one sequence; "
            "give it one that returns a fresh drafter"
        )
    try:
        return drafter.copy()
    except Exception as error:
        raise failed(drafter, error) from error


def failed(drafter: object, error: Exception) -> HeadwayError:
    """The error for a drafter that raised one."""
    name = type(drafter).__name__
    if isinstance(error, HeadwayError):
        named = copy(error)
        named.args = (f"the drafter {name}: {error}",)
        return named
    return InvalidInput(f"the drafter {name} raised {type(error).__name__}: {error}; the generation goes on without it")


def checked_draft(drafter: object, drafted: Any, limit: int, vocab: int, *, lines_only: bool = False) -> Draft:
    """What a drafter returned as a `Draft`, or an error that names the drafter and what is wrong; with `lines_only` for
    a tree too."""
    name = f"the drafter {type(drafter).__name__}"
    draft = drafted if isinstance(drafted, Draft) else Draft(())
    tokens = draft.tokens if isinstance(drafted, Draft) else drafted
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes):
        raise WrongType(f"{name} returned {short_repr(drafted)}; it must return token ids, or a Draft")
    ids = integers(list(islice(tokens, limit + 1)), f"{name}: its tokens")
    if len(ids) > limit:
        raise InvalidInput(f"{name} returned more than the {limit} tokens it was asked for")
    for token in ids:
        if not 0 <= token < vocab:
            raise InvalidInput(f"{name} returned token id {token}; ids are 0 to {vocab - 1}")
    parents = None if draft.parents is None else _parents(name, draft.parents, ids)
    chances = _probabilities(name, draft.probabilities, ids, vocab)
    draft = replace(draft, tokens=tuple(ids), parents=parents, probabilities=chances)
    if lines_only and not draft.is_line:
        raise Unsupported(
            f"{name} proposed a tree, and a model with recurrent layers takes in one line of tokens; let it propose "
            "lines"
        )
    return draft


def _parents(name: str, given: Any, ids: list[int]) -> tuple[int, ...]:
    parents = integers(list(islice(given, len(ids) + 1)), f"{name}: its parents")
    if len(parents) != len(ids):
        more = "more" if len(parents) > len(ids) else str(len(parents))
        raise InvalidInput(f"{name} returned {len(ids)} tokens and {more} parents; there must be one for each")
    seen: dict[tuple[int, int], int] = {}
    for i, (parent, token) in enumerate(zip(parents, ids)):
        if not -1 <= parent < i:
            raise InvalidInput(f"{name}: draft {i} follows draft {parent}; it must follow -1 or a draft before it")
        if (before := seen.setdefault((parent, token), i)) != i:
            raise InvalidInput(f"{name}: drafts {before} and {i} are both token {token} after draft {parent}")
    return tuple(parents)


def _probabilities(name: str, given: Any, ids: list[int], vocab: int) -> tuple[np.ndarray, ...] | None:
    if given is None:
        return None
    rows = tuple(np.asarray(row, np.float64) for row in islice(given, len(ids) + 1))
    if len(rows) != len(ids):
        raise InvalidInput(
            f"{name} returned {len(ids)} tokens and {len(rows)} distributions; there must be one for each"
        )
    for i, (row, token) in enumerate(zip(rows, ids)):
        if row.shape != (vocab,) or not np.isfinite(row).all() or (row < 0).any() or abs(row.sum() - 1) > 1e-3:
            raise InvalidInput(f"{name}: distribution {i} is not {vocab} probabilities that sum to 1")
        if row[token] <= 0:
            raise InvalidInput(f"{name}: draft {i} is token {token}, which its own distribution {i} gives no chance")
    return rows
