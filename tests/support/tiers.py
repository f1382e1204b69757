"""A host tier below the pool of a scripted engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import headway as hw
from headway.kv.tiers.host_tier import HostTier
from headway.kv.tiers.page_store import PageStore
from headway.runtime.scheduler.cache_tiers import CacheTiers


class ScriptedPlaces:
    """The memory of a store for pages of a `ScriptedRunner`."""

    page_bytes = 1
    page_seconds = None  # a copy always pays

    def __init__(self) -> None:
        self._pages: dict[int, np.ndarray] = {}

    def write(self, places: Sequence[int], data: Sequence[np.ndarray]) -> None:
        self._pages.update(zip(places, data, strict=True))

    def read(self, places: Sequence[int]) -> list[np.ndarray]:
        return [self._pages[place] for place in places]

    def to_bytes(self, place: int) -> bytes:
        return self._pages[place].tobytes()

    def from_bytes(self, pages: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(page, np.uint64).reshape(2, -1) for page in pages]


def with_host_tier(engine: hw.Engine, places: int) -> hw.Engine:
    """The engine, which keeps so many pages in host memory."""
    store = PageStore(ScriptedPlaces(), places)
    engine._loop.use_tiers(CacheTiers(HostTier(store, places), None, engine.page_size))
    return engine
