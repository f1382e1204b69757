"""The tensor behind the pages. Only the worker thread touches it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headway.kernels import kv
from headway.kv.allocator import Clear, Copy, Edit, Export, Import


class Pool:
    """Keys and values of every page: [L, 2, P + 1, page, Hkv, D]; page 0 stays zero.

    With `by_head` a head's slots of a page lie together in memory (`raw` is [L, 2, P + 1, Hkv, page, D]), which a
    kernel that reads pages in place wants; `kv` is a view of it then.
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
    ) -> None:
        inner = (kv_heads, page_size) if by_head else (page_size, kv_heads)
        shape = (layers, 2, pages + 1, *inner, head_dim)
        self.raw = _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.kv = self.raw.transpose(3, 4) if by_head else self.raw

    def apply(self, edits: Sequence[Edit]) -> None:
        """Do noted edits in order; neighbouring clears go in one call."""
        run: list[int] = []
        for edit in edits:
            if isinstance(edit, Clear) and edit.start == 0:
                run.append(edit.page)
                continue
            self._clear(run)
            run = []
            match edit:
                case Clear(page, start):
                    self.kv[:, :, page, start:] = 0
                case Copy(source, target, slots):
                    kv.copy(self.kv, source, target, slots)
                case Export(pages, target):
                    target.data = self.kv.index_select(2, self._index(pages)).cpu()
                case Import(source, places, pages):
                    data = source.data
                    assert isinstance(data, torch.Tensor)
                    self.kv.index_copy_(2, self._index(pages), data[:, :, list(places)].to(self.kv.device))
        self._clear(run)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.kv.device)

    def _clear(self, pages: list[int]) -> None:
        if pages:
            kv.clear(self.kv, self._index(pages))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory is only taken when it is first written; torch.zeros would touch all of it at once."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
