"""The KV cache of a model whose layers have heads of their own, as a tensor of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from headway.kernels.reference.rope import rerotate
from headway.kv.allocator import Gather
from headway.kv.tensor_pool import TensorPool


class SlotPool(TensorPool):
    """A slot has the keys of every layer and then its values, one layer after the other, each as wide as its own.

        slot │ keys 0 │ values 0 │ keys 1 │ values 1 │ …

    `keys` and `values` are a view [P + 1, page, Hkv, D] for each layer; `shapes` has their heads and dimensions, and
    `rotated` how many of these are rotated, by a row of inv_freq [L, …].
    """

    def __init__(
        self, *, shapes: Sequence[tuple[int, int]], rotated: Sequence[int], inv_freq: torch.Tensor, **how: Any
    ) -> None:
        wide = sum(2 * heads * dim for heads, dim in shapes)
        super().__init__(layers=1, kv_heads=1, head_dim=wide, value_dim=wide, inv_freq=inv_freq, **how)
        self._rotated = rotated
        whole = self._parts[0]  # [1, P + 1, page, 1, numbers of a slot]
        sizes = [size for heads, dim in shapes for size in (heads * dim,) * 2]
        parts = whole[0, :, :, 0].split(sizes, -1)
        views = [part.unflatten(-1, shapes[i // 2]) for i, part in enumerate(parts)]
        self.keys: Any = views[0::2]
        self.values: Any = views[1::2]

    def _gather(self, edit: Gather) -> None:
        super()._gather(replace(edit, shift=0))
        if not edit.shift:
            return
        assert self._inv_freq is not None
        before, end = self._index(edit.positions), edit.start + len(edit.pages)
        for keys, inv_freq, dim in zip(self.keys, self._inv_freq, self._rotated, strict=True):
            moved = keys[edit.target, edit.start : end]  # [slots, Hkv, D]
            moved.copy_(rerotate(moved[None], inv_freq[: dim // 2], before, before + edit.shift)[0])
