"""The KV cache of a model whose layers have heads of their own, in memory as the native step reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.kernels.host.rope import rerotate
from headway.kv import host_memory
from headway.kv.allocator import Gather
from headway.kv.pool import HostPool


class LayerPool(HostPool):
    """Keys and then values of one layer after the other, each [P + 1, numbers of a page], laid out as in a `HostPool`.

        layer 0: keys of all pages │ values of all pages │ layer 1: …

    `keys` and `values` have a view [P + 1, page, Hkv, D] for each layer; `shapes` has their heads and dimensions, and
    `rotated` how many of these are rotated, by a row of inv_freq [L, …]. A page is exported as a slot of `SlotPool` is:
    the keys and values of every layer, side by side.
    """

    def __init__(
        self,
        *,
        shapes: Sequence[tuple[int, int]],
        rotated: Sequence[int],
        pages: int,
        page_size: int,
        inv_freq: np.ndarray,
        dtype: str = "float32",
    ) -> None:
        wide = sum(2 * heads * dim for heads, dim in shapes)
        super().__init__(
            layers=1, pages=pages, page_size=page_size, kv_heads=1, head_dim=wide, value_dim=wide, inv_freq=inv_freq,
            dtype=dtype,
        )  # fmt: skip
        self._rotated, self._slot, self._planes = rotated, (page_size, 1, wide), list[np.ndarray]()
        flat, at, keys, values = self.raw.reshape(-1), 0, list[np.ndarray](), list[np.ndarray]()
        for heads, dim in shapes:
            numbers = page_size * heads * dim
            own = flat[at : at + 2 * (pages + 1) * numbers].reshape(2, pages + 1, numbers)
            keys.append(own[0].reshape(-1, heads, dim, page_size).transpose(0, 3, 1, 2))
            values.append(own[1].reshape(-1, heads, page_size, dim).transpose(0, 2, 1, 3))
            self._planes += [own[0], own[1]]
            at += own.size
        assert at == flat.size
        self.keys: Any = keys
        self.values: Any = values
        self._parts = tuple(part[None] for pair in zip(keys, values, strict=True) for part in pair)

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (1, 1, *self._slot)

    def give_back(self, pages: Sequence[int]) -> None:
        if self._memory is None:
            return
        start = self.raw.ctypes.data
        for plane in self._planes:
            at = plane.ctypes.data - start
            for first, end in host_memory.runs(pages):
                host_memory.give_back(self._memory, at + first * plane[0].nbytes, at + end * plane[0].nbytes)

    def _clear(self, pages: list[int]) -> None:
        for plane in self._planes:
            plane[pages] = 0

    def _gather(self, edit: Gather) -> None:
        pages, places = np.array(edit.pages, np.int64), np.array(edit.places, np.int64)
        positions, end = np.array(edit.positions, np.int64), edit.start + len(pages)
        for i, part in enumerate(self._parts):
            rows, layer = part[:, pages, places], i // 2
            if edit.shift and i % 2 == 0:
                inv_freq = self._inv_freq[layer, : self._rotated[layer] // 2]
                rows = rerotate(rows, inv_freq, positions, positions + edit.shift)
            part[:, edit.target, edit.start : end] = rows

    def read(self, pages: Sequence[int]) -> np.ndarray:
        index = np.array(pages, np.int64)
        slots = [
            part[0, index].reshape(len(index), self._slot[0], 1, math.prod(part.shape[-2:])) for part in self._parts
        ]
        return np.concatenate(slots, -1)[None, None]

    def write(self, pages: Sequence[int], data: np.ndarray) -> None:
        index, at = np.array(pages, np.int64), 0
        for part in self._parts:
            heads, dim = part.shape[-2:]
            rows = data[0, 0, ..., at : at + heads * dim]
            part[0, index] = rows.reshape(len(index), self._slot[0], heads, dim)
            at += heads * dim
