"""Normalization of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x scaled to unit mean square over its last dimension, in float32 inside, times weight.

    x [..., E], weight [E] → [..., E] of x's dtype. Weights that count from an offset are added to it in float32.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (offset + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x with mean 0 and variance 1 over its last dimension, in float32, times weight, plus bias.

    x [..., E], weight [..., E], bias [E] → [..., E] of x's dtype.
    """
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)
