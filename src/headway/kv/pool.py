"""The KV cache in memory: the tensor that holds the pages. Only the worker thread touches it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from headway.kernels.reference import kv
from headway.kernels.reference.rope import turn
from headway.kernels.transfer import to_device
from headway.kv import host_memory
from headway.kv.allocator import Clear, Copy, Edit, Export, Gather, Import


class Pool:
    """`keys` and `values` of every page, [L, P + 1, page, Hkv, D] each; page 0 stays zero.

    They are views of `raw` [L, 2, P + 1, numbers of a page]. With `by_head` a head's slots of a page are contiguous,
    for kernels that read pages in place; with `across` a head's keys are moreover stored dimension by dimension,
    [Hkv, D, page], so that one vector instruction scores several slots.
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
    ) -> None:
        self._inv_freq = inv_freq  # the model's angles for each position, by which keys are rotated
        self.clear_pages = kv.clear  # a runner may have a faster one
        shape = (layers, 2, pages + 1, page_size * kv_heads * head_dim)
        self._memory = None
        if device.type == "cpu":
            self._memory = host_memory.lazy_zeros(math.prod(shape) * dtype.itemsize)
            self.raw = torch.frombuffer(self._memory, dtype=torch.uint8).view(dtype).view(shape)
        else:
            self.raw = torch.zeros(shape, dtype=dtype, device=device)
        keys, values = self.raw.unbind(1)
        slots, heads = (page_size, kv_heads, head_dim), (kv_heads, page_size, head_dim)
        self.values = values.unflatten(2, heads).transpose(2, 3) if by_head else values.unflatten(2, slots)
        if across:
            self.keys = keys.unflatten(2, (kv_heads, head_dim, page_size)).permute(0, 1, 4, 2, 3)
        else:
            self.keys = keys.unflatten(2, heads).transpose(2, 3) if by_head else keys.unflatten(2, slots)

    def give_back(self, pages: Sequence[int]) -> None:
        """Give the memory of these pages, whose contents nobody needs, back to the system; they become zeros."""
        if self._memory is None:
            return
        layers, two, total, numbers = self.raw.shape
        size = numbers * self.width
        for first, end in host_memory.runs(pages):
            for plane in range(layers * two):
                at = plane * total * size
                host_memory.give_back(self._memory, at + first * size, at + end * size)

    @property
    def width(self) -> int:
        """Bytes of one number."""
        return self.raw.dtype.itemsize

    def apply(self, edits: Sequence[Edit]) -> None:
        """Do noted edits in order; consecutive clears go in one call."""
        run: list[int] = []
        for edit in edits:
            if isinstance(edit, Clear) and edit.start == 0:
                run.append(edit.page)
                continue
            self._clear(run)
            run = []
            match edit:
                case Clear(page, start):
                    self.keys[:, page, start:] = 0
                    self.values[:, page, start:] = 0
                case Copy(source, target, slots):
                    kv.copy(self.keys, source, target, slots)
                    kv.copy(self.values, source, target, slots)
                case Gather():
                    self._gather(edit)
                case Export(pages, target):
                    target.data = self.read(pages).cpu()
                case Import(source, places, pages):
                    data = source.data
                    assert isinstance(data, torch.Tensor)
                    self.write(pages, data[:, :, list(places)])
        self._clear(run)

    def _gather(self, edit: Gather) -> None:
        pages, places, end = self._index(edit.pages), self._index(edit.places), edit.start + len(edit.pages)
        keys = self.keys[:, pages, places]  # [L, slots, Hkv, D]
        if edit.shift:
            assert self._inv_freq is not None
            positions = self._index(edit.positions)
            keys = turn(keys, self._inv_freq, positions, positions + edit.shift)
        self.keys[:, edit.target, edit.start : end] = keys
        self.values[:, edit.target, edit.start : end] = self.values[:, pages, places]

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """Keys and values of these pages, [L, 2, pages, page, Hkv, D], however they lie in memory."""
        index = self._index(pages)
        return torch.stack([self.keys.index_select(1, index), self.values.index_select(1, index)], 1)

    def write(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """What `read` gave, into these pages."""
        index, data = self._index(pages), data.to(self.raw.device)
        self.keys.index_copy_(1, index, data[:, 0])
        self.values.index_copy_(1, index, data[:, 1])

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return to_device(pages, torch.int64, self.raw.device)

    def _clear(self, pages: list[int]) -> None:
        if pages:
            self.clear_pages(self.raw, self._index(pages))
