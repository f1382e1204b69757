"""Adapters with their scales, as rows are computed under them: what a pass asks for, and what a page's log remembers.

A mix refers to adapters that an engine has loaded, and so keeps them alive: a pass, a context's log or a preempted
context needs nothing else to be computed again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from headway.base.dataclass import dataclass

MAX_SCALE = 1e6  # and its negative, of an adapter in a pass
OUTSIDE = -1  # in the place of a layer's number: what a model has once


class LoadedWeights(Protocol):
    """An adapter that an engine has loaded."""

    @property
    def digest(self) -> str:
        """A strong hash of its weights."""
        ...


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class AdapterMix:
    """Adapters that add up, each times its scale; at least one. Mixes with the same `key` compute the same bits."""

    uses: tuple[tuple[LoadedWeights, float], ...]  # in the order of their hashes
    key: bytes  # a hash of the adapters' weights and their scales

    @classmethod
    def of(cls, uses: Iterable[tuple[LoadedWeights, float]]) -> AdapterMix | None:
        """The sum of these uses; None if it changes nothing. Scales of one adapter add up."""
        total: dict[str, tuple[LoadedWeights, float]] = {}
        for adapter, scale in uses:
            before = total.get(adapter.digest, (adapter, 0.0))[1]
            total[adapter.digest] = adapter, _single(before + scale)
        kept = tuple(use for _, use in sorted(total.items()) if use[1] != 0)
        if not kept:
            return None
        digest = blake2b(digest_size=32, person=b"headway-mix")
        for adapter, scale in kept:
            digest.update(adapter.digest.encode() + struct.pack("<f", scale))
        return cls(kept, digest.digest())


Mixes = Sequence[AdapterMix | None]  # one a row, None for a row without adapters


def same_mix(one: AdapterMix | None, other: AdapterMix | None) -> bool:
    """Whether rows under both are computed alike."""
    return one is other or (one is not None and other is not None and one.key == other.key)


def _single(value: float) -> float:
    """The nearest float32, which is what kernels multiply with."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
