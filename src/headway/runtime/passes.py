"""The Pass: one program's forward, frozen. Everything a program can ask for reduces to this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Protocol

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, InvalidMask
from headway.base.specs.adapters import Mixes
from headway.base.specs.brle import Brle
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import Sampling

if TYPE_CHECKING:
    import numpy as np
else:
    from headway.base.system.lazy_numpy import np

BEFORE = -1  # the row of the token just before the pass


class AsyncLogitMask(Protocol):
    """A logit mask that is computed concurrently with the device, while the pass that it binds is in flight."""

    def start(self, tokens: Sequence[int]) -> None:
        """The pass's tokens are known. Called under the engine's lock: it only starts the work."""
        ...

    def result(self) -> np.ndarray:
        """The mask [V], once it is there, or a HeadwayError. The device waits: it takes bounded time."""
        ...


class ConstraintCursor(Protocol):
    """A constraint that follows a decoding sequence: after each token, the mask of the next one."""

    @property
    def first(self) -> DecodeMask:
        """The mask after the token that the sequence is fed with first."""
        ...

    def advance(self, token: int) -> DecodeMask:
        """A token was sampled. Called under the engine's lock: it only starts the work."""
        ...


class DecodeMask(AsyncLogitMask, Protocol):
    """The mask after one token of a decoding sequence; everything but `start` waits for it, or raises."""

    def words(self) -> np.ndarray:
        """The mask as bits, [V / 32] of 32 each."""
        ...

    @property
    def ended(self) -> bool:
        """Nothing can follow the token."""
        ...

    @property
    def sparse(self) -> bool:
        """The mask allows little: the program continues by other means after the next token."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Readout:
    """A sampler or a probe at one row. `row` counts the pass's tokens, pending ones included; -1 is the one before.

    A sampler draws with (seed, position of the row, ordinal); `allowed` is its logit mask [V]; `seen` are the ids that
    the repetition penalty counts and `generated` how often presence and frequency count each id; `bias` [V] is added to
    the logits besides the sampler's own.
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
    counts_fed: bool = False  # tokens fed to the pass count as seen and generated
    async_mask: AsyncLogitMask | None = None  # another logit mask, which depends on the tokens fed to the pass
    bias: np.ndarray | None = None

    @property
    def dense_bias(self) -> np.ndarray | None:
        """What is added to the logits of every token [V], the sampler's own array included; -inf rules one out."""
        own = self.what.dense_bias if isinstance(self.what, Sampling) else None
        if own is None or self.bias is None:
            return self.bias if own is None else own
        return own + self.bias

    @property
    def is_biased(self) -> bool:
        """Whether something is added to the logits of every token, so that fast samplers cannot draw."""
        return self.bias is not None or (isinstance(self.what, Sampling) and self.what.dense_bias is not None)

    def permitted(self) -> np.ndarray | None:
        """The tokens that may be chosen [V]: `allowed` and, once it is there, the async mask."""
        if self.async_mask is None:
            return self.allowed
        mask = self.async_mask.result()
        return mask if self.allowed is None else mask & self.allowed


@dataclass(frozen=True, slots=True)
class Feed:
    """A token of a pass that an earlier pass samples: `row` is where it goes, `readout` which value it is."""

    row: int
    readout: int


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """One forward pass over the slots that follow a context's last.

    `masks` has for each token what it attends to (1 = attend): slots 0 to its own, or all slots of the pass when not
    causal; None for a token that sees every live slot up to itself. `pending` says how many leading tokens came from
    the pending buffer. With `commit=False` full pages stay working pages. `adapters` has what each token is computed
    under, None for a pass without adapters.
    """

    tokens: tuple[int, ...]
    positions: Sequence[int]  # a tuple, or a range
    masks: tuple[Brle | None, ...] | None = None
    readouts: tuple[Readout, ...] = ()
    pending: int = 0
    causal: bool = True
    commit: bool = True
    feeds: tuple[Feed, ...] = ()
    adapters: Mixes | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.positions):
            raise InvalidInput(
                f"a pass has {len(self.tokens)} tokens and {len(self.positions)} positions; give one each"
            )
        if self.masks is not None and len(self.masks) != len(self.tokens):
            raise InvalidMask(
                f"a pass has {len(self.tokens)} tokens and {len(self.masks)} masks; give one each, or None"
            )
        if self.adapters is not None and len(self.adapters) != len(self.tokens):
            raise InvalidInput(
                f"a pass has {len(self.tokens)} tokens and adapters for {len(self.adapters)}; give one each, or None"
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
            if readout.async_mask is not None:
                readout.async_mask.start(tokens)
        fed = [tokens[feed.row] for feed in self.feeds]
        readouts = tuple([_counted(r, before, tokens, fed) for r in self.readouts])
        masks, pending, causal, commit = self.masks, self.pending, self.causal, self.commit
        return Pass(tuple(tokens), self.positions, masks, readouts, pending, causal, commit, adapters=self.adapters)

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


def _counted(readout: Readout, before: Sequence[int], tokens: Sequence[int], fed: Sequence[int]) -> Readout:
    """The readout with its history counted again, now that every token is known, those among them that were fed."""
    if not (readout.seen_by_rows or readout.counts_fed):
        return readout
    past = (*before, *tokens[: readout.row + 1])
    counts = Counter(past) if readout.generated_by_rows else Counter(readout.generated)
    if readout.counts_fed:
        counts.update(fed)
    seen = past if readout.seen_by_rows else readout.seen
    return replace(readout, seen=tuple(sorted({*seen, *counts})), generated=dict(counts))
