"""Root-mean-square normalization."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x scaled to unit mean square over its last dimension, in float32 inside, times weight.

    x [..., E], weight [E] → [..., E] of x's dtype.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
