"""Writing, copying and clearing pages of the KV cache."""

from __future__ import annotations

from torch import Tensor


def write(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """rows [W, Hkv, D] into pages [P, page, Hkv, D] at physical slots [W]."""
    if pages.is_contiguous():
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, rows.to(pages.dtype))
    else:
        pages[slots // pages.shape[1], slots % pages.shape[1]] = rows.to(pages.dtype)


def copy(pool: Tensor, source: int, target: int, slots: int) -> None:
    """The first `slots` slots of one page of pool [L, P, page, Hkv, D] into another, in every layer."""
    pool[:, target, :slots] = pool[:, source, :slots]


def clear(pool: Tensor, pages: Tensor) -> None:
    """Zero whole pages of pool [L, 2, P, …]: an old owner's infinities must not reach a new one through a mask."""
    pool.index_fill_(2, pages, 0.0)
