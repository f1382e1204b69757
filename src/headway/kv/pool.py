"""The KV cache in memory: the array that holds the pages. Only the worker thread touches it.

`Pool` is what the engine needs of one; `HostPool` is that of the native step, `tensor_pool` has the one of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from headway.base.arrays import STORED
from headway.kernels.host.rope import rerotate
from headway.kv import host_memory
from headway.kv.allocator import Clear, Copy, Edit, Export, Gather, Import, Load, Save
from headway.kv.tiers.page_store import HostPlaces, PlaceMemory


def in_runs(edits: Sequence[Edit]) -> Iterator[Edit | list[int]]:
    """The edits in order, with the pages of consecutive clears of whole pages as one list."""
    run: list[int] = []
    for edit in edits:
        if isinstance(edit, Clear) and edit.start == 0:
            run.append(edit.page)
            continue
        if run:
            yield run
            run = []
        yield edit
    if run:
        yield run


class Pool(Protocol):
    """Keys and values of every page; page 0 stays zero."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        ...

    @property
    def width(self) -> int:
        """Bytes of one number."""
        ...

    @property
    def page_shape(self) -> tuple[int, ...]:
        """(layers, 2, page, Hkv, D): the numbers of one page; 1 in place of 2 where values are part of keys."""
        ...

    def apply(self, edits: Sequence[Edit]) -> None:
        """Do noted edits in order. What is exported, and imported again, is an array of the host."""
        ...

    def give_back(self, pages: Sequence[int]) -> None:
        """Give the memory of these pages, whose contents nobody needs, back to the system; they become zeros."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, of all layers."""
        ...

    def new_places(self, count: int) -> PlaceMemory:
        """Memory of the host for pages that leave the pool."""
        ...

    def from_bytes(self, data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Bytes of a file as numbers of the pool's type, on the host."""
        ...

    def save_state(self, state: Any) -> np.ndarray:
        """The bytes of a token's residual, as the runner keeps it."""
        ...

    def load_state(self, data: np.ndarray, dtype: str) -> object:
        """What `save_state` gave, as the runner keeps it: in the float type that it computes in."""
        ...

    def save_recurrent(self, place: int) -> np.ndarray:
        """The bytes of the recurrent state at a place."""
        ...

    def load_recurrent(self, place: int, data: np.ndarray) -> None:
        """Put what `save_recurrent` gave at a place."""
        ...


class HostPool:
    """`keys` and `values` [L, P + 1, page, Hkv, D], as the native step reads them.

    They are views of `raw` [L, 2, P + 1, numbers of a page]. A head's slots of a page are contiguous, and its keys are
    stored dimension by dimension, [Hkv, D, page], so that one vector instruction scores several slots. With `value_dim`
    a value is the last so many numbers of its key and takes no memory of its own: `raw` is [L, 1, P + 1, numbers of a
    page], slot by slot.

    `states` [places + 1, recurrent layers, numbers] is the state pool of a model with recurrent layers: its argument is
    (places, layers, numbers). Place 0 stays zero.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        inv_freq: np.ndarray,
        dtype: str = "float32",
        value_dim: int | None = None,
        states: tuple[int, int, int] | None = None,
    ) -> None:
        self._inv_freq = inv_freq  # the model's angles for each position, by which keys are rotated
        shape = (layers, 2 if value_dim is None else 1, pages + 1, page_size * kv_heads * head_dim)
        self.raw, self._memory = _zeros(shape, STORED[dtype])
        self._clean = np.ones(pages + 1, bool)  # zeros that nobody has taken yet: to clear them would take memory
        self.states: np.ndarray | None = None
        if states is not None:
            places, recurrent, numbers = states
            self.states, _ = _zeros((places + 1, recurrent, numbers), np.dtype(np.float32))
        if value_dim is not None:
            self.keys = self.raw[:, 0].reshape(layers, pages + 1, page_size, kv_heads, head_dim)
            self.values = self.keys[..., head_dim - value_dim :]
            self._parts = (self.keys,)
            return
        keys, values = self.raw[:, 0], self.raw[:, 1]
        heads = (layers, pages + 1, kv_heads)
        self.keys = keys.reshape(*heads, head_dim, page_size).transpose(0, 1, 4, 2, 3)
        self.values = values.reshape(*heads, page_size, head_dim).transpose(0, 1, 3, 2, 4)
        assert not layers or np.shares_memory(self.keys, self.raw)
        assert not layers or np.shares_memory(self.values, self.raw)
        self._parts = (self.keys, self.values)

    @property
    def pages(self) -> int:
        """How many there are, with page 0."""
        return self.raw.shape[2]

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    @property
    def width(self) -> int:
        return self.raw.itemsize

    @property
    def page_shape(self) -> tuple[int, ...]:
        layers, _, *page = self.keys.shape
        return (layers, len(self._parts), *page)

    def give_back(self, pages: Sequence[int]) -> None:
        if self._memory is not None:
            host_memory.give_back_pages(self._memory, self.raw.shape, self.width, pages)

    def apply(self, edits: Sequence[Edit]) -> None:
        """Do noted edits in order; consecutive clears go in one call."""
        for edit in in_runs(edits):
            match edit:
                case list():
                    self._clear(edit)
                case Clear(page, start):
                    for part in self._parts:
                        part[:, page, start:] = 0
                case Copy(source, target, slots):
                    for part in self._parts:
                        part[:, target, :slots] = part[:, source, :slots]
                case Gather():
                    self._gather(edit)
                case Export(pages, target):
                    target.data = self.read(pages)
                case Import(source, places, pages):
                    data = source.data
                    assert isinstance(data, np.ndarray)
                    self.write(pages, data[:, :, list(places)])
                case Save(pages, store, places, names):
                    store.save(places, names, pages, self.read)
                case Load(source, places, names, pages):
                    self.write(pages, source.load(places, names))

    def _clear(self, pages: list[int]) -> None:
        index = np.array(pages, np.int64)
        self.raw[:, :, index[~self._clean[index]]] = 0
        self._clean[index] = False

    def _gather(self, edit: Gather) -> None:
        pages, places = np.array(edit.pages, np.int64), np.array(edit.places, np.int64)
        end = edit.start + len(pages)
        keys, *values = (part[:, pages, places] for part in self._parts)  # [L, slots, Hkv, D]
        if edit.shift:
            positions = np.array(edit.positions, np.int64)
            keys = rerotate(keys, self._inv_freq, positions, positions + edit.shift)
        for part, rows in zip(self._parts, (keys, *values), strict=True):
            part[:, edit.target, edit.start : end] = rows

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Keys and values of these pages, [L, 2, pages, page, Hkv, D]; keys alone, [L, 1, …], where values are part of
        them."""
        index = np.array(pages, np.int64)
        return np.stack([part[:, index] for part in self._parts], 1)

    def write(self, pages: Sequence[int], data: np.ndarray) -> None:
        """What `read` gave, into these pages."""
        index = np.array(pages, np.int64)
        for i, part in enumerate(self._parts):
            part[:, index] = data[:, i]

    @property
    def page_bytes(self) -> int:
        return math.prod(self.page_shape) * self.width

    def new_places(self, count: int) -> HostPlaces:
        return HostPlaces(count, self.page_shape, self.raw.dtype)

    def from_bytes(self, data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return data.copy().view(self.raw.dtype).reshape(shape)  # as the file has it, it may be unaligned

    def save_state(self, state: Any) -> np.ndarray:
        return np.ascontiguousarray(state).view(np.uint8).ravel()

    def load_state(self, data: np.ndarray, dtype: str) -> np.ndarray:
        return data.copy().view(STORED[dtype])

    def save_recurrent(self, place: int) -> np.ndarray:
        assert self.states is not None
        return self.save_state(self.states[place].copy())

    def load_recurrent(self, place: int, data: np.ndarray) -> None:
        assert self.states is not None
        self.states[place] = data.copy().view(np.float32).reshape(self.states.shape[1:])


def _zeros(shape: tuple[int, ...], kind: np.dtype) -> tuple[np.ndarray, Any]:
    """Zeros that take memory when they are written, and that memory."""
    size = math.prod(shape) * kind.itemsize
    if size == 0:  # of a model without attention
        return np.zeros(shape, kind), None
    memory = host_memory.lazy_zeros(size)
    return np.frombuffer(memory, kind).reshape(shape), memory
