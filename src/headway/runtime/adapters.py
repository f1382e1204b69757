"""The adapters that an engine has loaded: each once, by the hash of its weights, while somebody needs it.

Who keeps one: the engine (after `load`, until `unload`), the `Adapter` that it was loaded for, and every mix that names
it: passes in flight, and the logs of contexts, preempted and saved ones too. When the last of them is gone, so are its
weights. A cached page needs none: its key has the hash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr
from headway.models.adapters.adapter import Adapter
from headway.models.adapters.bound import BoundAdapter, bind, stored_pair
from headway.models.config import ModelConfig


class DeviceWeights(Protocol):
    """An adapter's weights as a runner computes with them."""

    @property
    def nbytes(self) -> int: ...


class NoWeights:
    """In the place of an adapter's weights while its engine sleeps."""

    nbytes = 0


class HeadPair(NamedTuple):
    """What an adapter adds to the logits: factor × B (A h)."""

    a: np.ndarray  # [r, E] float32
    b: np.ndarray  # [V, r] float32
    factor: float


class LoadedAdapter:
    """An adapter that an engine can compute with."""

    __slots__ = ("__weakref__", "bound", "digest", "head", "name", "rank", "weights")

    def __init__(self, adapter: BoundAdapter, weights: DeviceWeights) -> None:
        self.digest, self.name, self.rank, self.weights = adapter.digest, adapter.name, adapter.rank, weights
        self.bound = adapter  # another runner loads it again
        self.head = None if adapter.head is None else HeadPair(*stored_pair(adapter.head, half=False))

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + (0 if self.head is None else self.head.a.nbytes + self.head.b.nbytes)


class LoadedAdapters:
    """The adapters of one engine. `upload` gives a bound one to the device; it is called by one thread at a time."""

    def __init__(self, config: ModelConfig, upload: Callable[[BoundAdapter], DeviceWeights]) -> None:
        self._config, self._upload = config, upload
        self._lock = threading.Lock()
        self._runners = 0  # that have come since
        self._loaded: WeakValueDictionary[str, LoadedAdapter] = WeakValueDictionary()
        self._kept: dict[str, LoadedAdapter] = {}
        self._used: WeakKeyDictionary[Adapter, LoadedAdapter] = WeakKeyDictionary()

    def load(self, adapter: Adapter) -> LoadedAdapter:
        """The adapter, loaded if it is not; it stays at least as long as `adapter`."""
        if not isinstance(adapter, Adapter):
            raise WrongType(f"{short_repr(adapter)} is not an adapter; give hw.Adapter.load(folder)")
        if (known := self._used.get(adapter)) is not None:  # without the lock: another one may be on its way
            return known
        with self._lock:
            known = self._loaded.get(adapter.digest)
            if known is None:
                known = self._load(bind(adapter, self._config))
            self._used[adapter] = known
            return known

    def _load(self, bound: BoundAdapter) -> LoadedAdapter:
        runners = self._runners
        loaded = self._loaded[bound.digest] = LoadedAdapter(bound, self._upload(bound))
        while runners != self._runners:  # another runner has come before this one was known to be loaded
            runners = self._runners
            loaded.weights = self._upload(bound)
        return loaded

    def keep(self, adapter: Adapter) -> None:
        """Load an adapter, to stay until `drop`."""
        loaded = self.load(adapter)
        with self._lock:
            self._kept[loaded.digest] = loaded

    def drop(self, adapter: Adapter) -> None:
        """Let go of an adapter; what needs it still keeps it. Raises if it is not loaded."""
        if not isinstance(adapter, Adapter):
            raise WrongType(f"{short_repr(adapter)} is not an adapter; give the one that was loaded")
        with self._lock:
            users = [user for user in list(self._used) if user.digest == adapter.digest]
            if not users and adapter.digest not in self._kept:
                raise InvalidInput(
                    f"the adapter {adapter.name!r} is not loaded: it was unloaded before, or no pass has used it"
                )
            for user in users:
                del self._used[user]
            self._kept.pop(adapter.digest, None)

    def load_again(self, upload: Callable[[BoundAdapter], DeviceWeights]) -> None:
        """Another runner computes from now on: it has weights of its own."""
        self._runners += 1
        for one in list(self._loaded.values()):
            one.weights = upload(one.bound)

    def find(self, digest: str) -> LoadedAdapter | None:
        """The loaded adapter whose weights have this hash."""
        return self._loaded.get(digest)

    def has(self, adapter: object) -> bool:
        """Whether this engine has loaded it."""
        return isinstance(adapter, LoadedAdapter) and self._loaded.get(adapter.digest) is adapter

    def figures(self) -> tuple[int, int]:
        """How many are loaded, and their bytes on the device; those that are unloaded and still needed included."""
        loaded = list(self._loaded.values())
        return len(loaded), sum(one.nbytes for one in loaded)
