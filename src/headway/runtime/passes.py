"""The Pass: one program's forward, frozen. Everything a program can ask for reduces to this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from headway.base.brle import Brle
from headway.base.errors import InvalidInput, InvalidMask
from headway.base.probes import Probe
from headway.base.samplers import Sampling

BEFORE = -1  # the row of the token just before the pass


class Later(Protocol):
    """A logit mask that is computed beside the device, while the pass that it binds is on its way."""

    def start(self, tokens: Sequence[int]) -> None:
        """The pass's tokens are known. Called under the engine's lock: it only sets the work going."""
        ...

    def result(self) -> np.ndarray:
        """The mask [V], as soon as it is there, or a HeadwayError. The device waits: it takes bounded time."""
        ...


class Follower(Protocol):
    """What binds the tokens of a streak: a mask behind each, set going as soon as the token is known."""

    @property
    def first(self) -> Followed:
        """The mask behind the token that the streak is fed with."""
        ...

    def follow(self, token: int) -> Followed:
        """A token was drawn. Called under the engine's lock."""
        ...


class Followed(Later, Protocol):
    """The mask behind a token of a streak; all of it but `start` waits until it is there, or raises."""

    def words(self) -> np.ndarray:
        """The mask as bits, [V / 32] of 32 each."""
        ...

    @property
    def ended(self) -> bool:
        """Nothing can follow the token."""
        ...

    @property
    def sparse(self) -> bool:
        """Little can: the program goes on by other means behind the next token."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Readout:
    """A sampler or a probe at one row. `row` counts the pass's tokens, pending ones included; -1 is the one before.

    A sampler draws with (seed, position of the row, ordinal); `allowed` is its logit mask [V]; `seen` are the ids that
    the repetition penalty counts and `generated` how often presence and frequency count each id.
    """

    row: int
    what: Sampling | Probe
    allowed: np.ndarray | None = None
    seed: int = 0
    ordinal: int = 0
    seen: Sequence[int] = ()
    generated: Mapping[int, int] = field(default_factory=dict)
    seen_by_rows: bool = False  # `seen` is the sequence up to its row, tokens fed to the pass among them
    generated_by_rows: bool = False
    later: Later | None = None  # a further logit mask, that the tokens fed to the pass decide

    def permitted(self) -> np.ndarray | None:
        """The tokens that may be chosen [V]: `allowed` and, once it is there, the mask that comes later."""
        if self.later is None:
            return self.allowed
        found = self.later.result()
        return found if self.allowed is None else found & self.allowed


@dataclass(frozen=True, slots=True)
class Feed:
    """A token of a pass that an earlier pass samples: `row` is where it goes, `readout` which value it is."""

    row: int
    readout: int


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """One forward over the slots that follow a context's last.

    `masks` has for each token what it attends to (1 = attend): slots 0 to its own, or all slots of the pass when not
    causal; None for a token that sees every live slot up to itself. `pending` says how many leading tokens came from
    the pending buffer. With `commit=False` full pages stay working pages.
    """

    tokens: tuple[int, ...]
    positions: Sequence[int]  # a tuple, or a range
    masks: tuple[Brle | None, ...] | None = None
    readouts: tuple[Readout, ...] = ()
    pending: int = 0
    causal: bool = True
    commit: bool = True
    feeds: tuple[Feed, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.positions):
            raise InvalidInput(
                f"a pass has {len(self.tokens)} tokens and {len(self.positions)} positions; give one each"
            )
        if self.masks is not None and len(self.masks) != len(self.tokens):
            raise InvalidMask(
                f"a pass has {len(self.tokens)} tokens and {len(self.masks)} masks; give one each, or None"
            )
        if not 0 <= self.pending <= len(self.tokens):
            raise InvalidInput(f"pending is {self.pending}; it counts leading tokens, 0 to {len(self.tokens)}")

    @property
    def rows(self) -> int:
        return len(self.tokens) - self.pending

    def fed(self, values: Mapping[int, object], before: Sequence[int]) -> Pass:
        """The pass with the tokens that an earlier pass has sampled meanwhile; `before` are the context's tokens."""
        tokens = list(self.tokens)
        for feed in self.feeds:
            token = values[feed.readout]
            assert isinstance(token, int)
            tokens[feed.row] = token
        for readout in self.readouts:
            if readout.later is not None:
                readout.later.start(tokens)
        readouts = tuple([_counted(r, before, tokens) if r.seen_by_rows else r for r in self.readouts])
        return Pass(tuple(tokens), self.positions, self.masks, readouts, self.pending, self.causal, self.commit)

    def mask(self, i: int) -> Brle | None:
        return None if self.masks is None else self.masks[i]


@dataclass(frozen=True, slots=True)
class PassStats:
    """What a pass took. `pages_trimmed` counts pages left out of attention; `seeds` those its samplers drew with."""

    rows: int
    pages: int
    pages_trimmed: int
    cache_hits: int
    batch_size: int
    steps: int
    seconds: float
    seeds: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class PassResult:
    """One value for each readout, in order, and the figures."""

    values: tuple[object, ...]
    stats: PassStats


def _counted(readout: Readout, before: Sequence[int], tokens: Sequence[int]) -> Readout:
    """The readout with its history counted again, now that every token is known."""
    past = (*before, *tokens[: readout.row + 1])
    counts = Counter(past) if readout.generated_by_rows else readout.generated
    return replace(readout, seen=tuple(sorted({*past, *counts})), generated=dict(counts))
