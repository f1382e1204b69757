"""The KV cache as a tensor of torch, on any device. Only the worker thread touches it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from mmap import mmap
from typing import Any

import numpy as np
import torch

from headway.base.arrays import from_tensor
from headway.kernels.reference import kv
from headway.kernels.reference.quantized import tensor
from headway.kernels.reference.rope import rerotate
from headway.kernels.transfer import to_device
from headway.kv import host_memory
from headway.kv.allocator import Clear, Copy, Edit, Export, Gather, Import, Load, Save
from headway.kv.pool import in_runs
from headway.kv.tiers.tensor_places import TensorPlaces


class TensorPool:
    """`keys` and `values` of every page, [L, P + 1, page, Hkv, D] each; page 0 stays zero.

    They are views of `raw` [L, 2, P + 1, numbers of a page]. With `by_head` a head's slots of a page are contiguous,
    for kernels that read pages in place; with `across` a head's keys are moreover stored dimension by dimension,
    [Hkv, D, page], so that one vector instruction scores several slots. With `value_dim` a value is the last so many
    numbers of its key and takes no memory of its own: `raw` is [L, 1, P + 1, numbers of a page].

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
        dtype: torch.dtype,
        device: torch.device,
        by_head: bool = False,
        across: bool = False,
        inv_freq: torch.Tensor | None = None,
        value_dim: int | None = None,
        states: tuple[int, int, int] | None = None,
    ) -> None:
        self.clear_pages = kv.clear  # a runner may have a faster one
        self._inv_freq = inv_freq  # the model's angles for each position, by which keys are rotated
        shape = (layers, 2 if value_dim is None else 1, pages + 1, page_size * kv_heads * head_dim)
        self.raw, self._memory = _zeros(shape, dtype, device)
        self.states: torch.Tensor | None = None
        if states is not None:
            places, recurrent, numbers = states
            self.states, _ = _zeros((places + 1, recurrent, numbers), torch.float32, device)
        keys, values = self.raw[:, 0], self.raw[:, -1]
        slots, heads = (page_size, kv_heads, head_dim), (kv_heads, page_size, head_dim)
        self.values = values.unflatten(2, heads).transpose(2, 3) if by_head else values.unflatten(2, slots)
        if across:
            self.keys = keys.unflatten(2, (kv_heads, head_dim, page_size)).permute(0, 1, 4, 2, 3)
        else:
            self.keys = keys.unflatten(2, heads).transpose(2, 3) if by_head else keys.unflatten(2, slots)
        self._parts = (self.keys, self.values)
        if value_dim is not None:
            self._parts, self.values = (self.keys,), self.keys[..., head_dim - value_dim :]

    def apply(self, edits: Sequence[Edit]) -> None:
        """Do noted edits in order; consecutive clears go in one call."""
        for edit in in_runs(edits):
            match edit:
                case list():
                    self.clear_pages(self.raw, self._index(edit))
                case Clear(page, start):
                    for part in self._parts:
                        part[:, page, start:] = 0
                case Copy(source, target, slots):
                    for part in self._parts:
                        kv.copy(part, source, target, slots)
                case Gather():
                    self._gather(edit)
                case Export(pages, target):
                    target.data = from_tensor(self.read(pages))
                case Import(source, places, pages):
                    data = source.data
                    assert isinstance(data, np.ndarray)
                    self.write(pages, tensor(data[:, :, list(places)]))
                case Save(pages, store, places, names):
                    store.save(places, names, pages, self.read)
                case Load(source, places, names, pages):
                    self.write(pages, source.load(places, names))

    def _gather(self, edit: Gather) -> None:
        pages, places, end = self._index(edit.pages), self._index(edit.places), edit.start + len(edit.pages)
        keys, *values = (part[:, pages, places] for part in self._parts)  # [L, slots, Hkv, D]
        if edit.shift:
            assert self._inv_freq is not None
            positions = self._index(edit.positions)
            keys = rerotate(keys, self._inv_freq, positions, positions + edit.shift)
        for part, rows in zip(self._parts, (keys, *values), strict=True):
            part[:, edit.target, edit.start : end] = rows

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """Keys and values of these pages, [L, 2, pages, page, Hkv, D], however they lie in memory. Where values are
        part of keys it is keys alone, [L, 1, …]."""
        index = self._index(pages)
        return torch.stack([part.index_select(1, index) for part in self._parts], 1)

    def write(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """What `read` gave, into these pages."""
        index, data = self._index(pages), data.to(self.raw.device)
        for i, part in enumerate(self._parts):
            part.index_copy_(1, index, data[:, i])

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    @property
    def width(self) -> int:
        return self.raw.element_size()

    @property
    def page_shape(self) -> tuple[int, ...]:
        layers, _, *page = self._parts[0].shape
        return (layers, len(self._parts), *page)

    def give_back(self, pages: Sequence[int]) -> None:
        if self._memory is not None:
            host_memory.give_back_pages(self._memory, self.raw.shape, self.width, pages)

    @property
    def page_bytes(self) -> int:
        return math.prod(self.page_shape) * self.width

    def new_places(self, count: int) -> TensorPlaces:
        return TensorPlaces(count, self.page_shape, self.raw.dtype, self.raw.device)

    def from_bytes(self, data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return from_tensor(_numbers(data, self.raw.dtype)).reshape(shape)

    def save_state(self, state: Any) -> np.ndarray:
        return state.cpu().contiguous().view(torch.uint8).flatten().numpy()

    def load_state(self, data: np.ndarray, dtype: str) -> torch.Tensor:
        return _numbers(data, getattr(torch, dtype)).to(self.raw.device)

    def save_recurrent(self, place: int) -> np.ndarray:
        assert self.states is not None
        return self.save_state(self.states[place])

    def load_recurrent(self, place: int, data: np.ndarray) -> None:
        assert self.states is not None
        self.states[place] = _numbers(data, torch.float32).view(self.states.shape[1:]).to(self.states.device)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return to_device(pages, torch.int64, self.raw.device)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, mmap | bytearray | None]:
    """Zeros that take memory when they are written, on a CPU, and that memory."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device), None
    memory = host_memory.lazy_zeros(size)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape), memory


def _numbers(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if not data.size:  # of a model without attention
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(data.copy()).view(dtype)  # as the file has it, it may be unaligned
