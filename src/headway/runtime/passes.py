"""The Pass: one program's forward, frozen. Everything a program can ask for reduces to this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headway.base.brle import Brle
from headway.base.probes import Probe
from headway.base.samplers import Sampling

BEFORE = -1  # the row of the token just before the pass


@dataclass(frozen=True, eq=False)
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
    counts_rows: bool = False  # its history goes up to its row, so tokens fed to the pass belong to it


@dataclass(frozen=True)
class Feed:
    """A token of a pass that an earlier pass samples: `row` is where it goes, `readout` which value it is."""

    row: int
    readout: int


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward over the slots that follow a context's last.

    `masks` has for each token what it attends to (1 = attend): slots 0 to its own, or all slots of the pass when not
    causal; None for a token that sees every live slot up to itself. `pending` says how many leading tokens came from
    the pending buffer. With `commit=False` full pages stay working pages.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    masks: tuple[Brle | None, ...] | None = None
    readouts: tuple[Readout, ...] = ()
    pending: int = 0
    causal: bool = True
    commit: bool = True
    feeds: tuple[Feed, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.positions)
        assert self.masks is None or len(self.masks) == len(self.tokens)

    @property
    def rows(self) -> int:
        return len(self.tokens) - self.pending

    def fed(self, values: Mapping[int, object]) -> Pass:
        """The pass with the tokens that an earlier pass has sampled meanwhile."""
        tokens = list(self.tokens)
        for feed in self.feeds:
            token = values[feed.readout]
            assert isinstance(token, int)
            tokens[feed.row] = token
        readouts = tuple(_counting(r, [tokens[f.row] for f in self.feeds if f.row <= r.row]) for r in self.readouts)
        return replace(self, tokens=tuple(tokens), readouts=readouts, feeds=())

    def mask(self, i: int) -> Brle | None:
        return None if self.masks is None else self.masks[i]


@dataclass(frozen=True)
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


@dataclass(frozen=True, eq=False)
class PassResult:
    """One value for each readout, in order, and the figures."""

    values: tuple[object, ...]
    stats: PassStats


def _counting(readout: Readout, tokens: Sequence[int]) -> Readout:
    """The readout with more tokens in its history, if that goes by rows."""
    if not readout.counts_rows or not tokens:
        return readout
    counts = dict(readout.generated)
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    return replace(readout, seen=tuple(sorted({*readout.seen, *tokens})), generated=counts)
