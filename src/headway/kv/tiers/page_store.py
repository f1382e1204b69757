"""Pages in host memory, place by place, as the worker writes and reads them.

A place says what is in it: a page is read only if its place still holds it. So a page that was overwritten, or never
written because a copy failed, is a miss and never another page's contents. Only the worker calls `save` and `load`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from headway.base.errors import PassFailed
from headway.base.system.log import log_event
from headway.kv import host_memory

WEIGHT = 0.25  # of the newest measurement
AT_ONCE = 32 << 20  # bytes of pages that one edit moves, at most: a device holds so much of them on their way


class PageName(NamedTuple):
    """The page of a key, of those kept since everything was last dropped."""

    key: bytes
    generation: int


class PlaceMemory(Protocol):
    """The memory of a store: places of one page each."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        ...

    @property
    def page_seconds(self) -> float | None:
        """How long a page takes from here to the pool; None while that is not known."""
        ...

    def write(self, places: Sequence[int], data: Any) -> None:
        """Pages as the pool reads them, [L, 2, pages, page, Hkv, D], into their places."""
        ...

    def read(self, places: Sequence[int]) -> Any:
        """What `write` got, as the pool writes it."""
        ...

    def to_bytes(self, place: int) -> bytes:
        """A page as it is written to a file."""
        ...

    def from_bytes(self, pages: Sequence[bytes]) -> Any:
        """Pages of files, as the pool writes them."""
        ...


class PageSource(Protocol):
    """Where an edit brings pages from."""

    def load(self, places: Sequence[int], names: Sequence[PageName]) -> Any:
        """These pages, as the pool writes them; raises if one of them is not there."""
        ...


class PageStore:
    """Places 0 … n - 1 and what is in them. What a page overwrites is handed to `spill`."""

    def __init__(
        self, memory: PlaceMemory, places: int, spill: Callable[[bytes, bytes], None] = lambda key, page: None
    ) -> None:
        self.memory = memory
        self.generation = 0  # raised by the bookkeeping when everything is dropped
        self.failed: deque[PageName] = deque()  # pages that could not be written, for the bookkeeping to forget
        self.errors = 0
        self._spill = spill
        self._names: list[PageName | None] = [None] * places

    def save(
        self, places: Sequence[int], names: Sequence[PageName], pages: Sequence[int], read: Callable[[Any], Any]
    ) -> None:
        """Keep pages that the pool reads. It never raises: a page that cannot be kept is computed again one day."""
        try:
            for place in places:
                self._leave(place)
            self.memory.write(places, read(pages))
        except Exception as error:
            if not self.errors:
                log_event("pages could not be kept in host memory; they are computed again", why=str(error))
            self.errors += 1
            self.failed.extend(names)
            return
        for place, name in zip(places, names, strict=True):
            self._names[place] = name

    def load(self, places: Sequence[int], names: Sequence[PageName]) -> Any:
        if any(self._names[place] != name for place, name in zip(places, names, strict=True)):
            raise PassFailed("a page is no longer in host memory")
        return self.memory.read(places)

    def _leave(self, place: int) -> None:
        """What is in a place is about to be overwritten."""
        name, self._names[place] = self._names[place], None
        if name is not None and name.generation == self.generation:
            self._spill(name.key, self.memory.to_bytes(place))


class FetchedPages:
    """Pages that were read from files, to be imported."""

    def __init__(self, memory: PlaceMemory, pages: Sequence[bytes]) -> None:
        self._memory, self._pages = memory, pages

    def load(self, places: Sequence[int], names: Sequence[PageName]) -> Any:
        return self._memory.from_bytes([self._pages[place] for place in places])


class HostPlaces:
    """Places beside a `HostPool`: an array [places, L, 2, page, Hkv, D] that takes memory when it is written."""

    def __init__(self, places: int, page_shape: Sequence[int], kind: np.dtype) -> None:
        self.page_bytes, self._shape = math.prod(page_shape) * kind.itemsize, tuple(page_shape)
        memory = host_memory.lazy_zeros(places * self.page_bytes)
        self._pages = np.frombuffer(memory, kind).reshape(places, *page_shape)
        self.page_seconds: float | None = None

    def write(self, places: Sequence[int], data: np.ndarray) -> None:
        for i, place in enumerate(places):
            self._pages[place] = data[:, :, i]

    def read(self, places: Sequence[int]) -> np.ndarray:
        began = time.perf_counter()
        data = np.ascontiguousarray(np.moveaxis(self._pages[list(places)], 0, 2))
        self.page_seconds = averaged(self.page_seconds, (time.perf_counter() - began) / len(places))
        return data

    def to_bytes(self, place: int) -> bytes:
        return self._pages[place].tobytes()

    def from_bytes(self, pages: Sequence[bytes]) -> np.ndarray:
        data = np.frombuffer(b"".join(pages), self._pages.dtype).reshape(len(pages), *self._shape)
        return np.moveaxis(data, 0, 2)


def pages_at_once(page_bytes: int, places: int) -> int:
    """How many pages one edit moves at most."""
    return max(1, min(places, AT_ONCE // page_bytes))


def averaged(mean: float | None, newest: float) -> float:
    """A moving mean of measurements."""
    return newest if mean is None else mean + WEIGHT * (newest - mean)
