"""Rotary position embedding, in the half-split layout: dimension i pairs with i + D/2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(inv_freq: Tensor, positions: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every row's angles: positions [T] → two [T, 1, D]."""
    angles = positions.float()[:, None] * inv_freq[None, :]  # [T, D/2]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]  # [T, 1, D]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] rotated by its row's angles. Dimensions past the width of cos stay unchanged."""
    width = cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    half = width // 2
    swapped = torch.cat((-rotated[..., half:], rotated[..., :half]), dim=-1)
    rotated = rotated * cos + swapped * sin
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)


def rerotate(keys: Tensor, inv_freq: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Keys [L, T, Hkv, D] that were rotated for positions `before` [T], as they would be for `after` [T].

    inv_freq [D/2] is for all layers, [L, D/2] has a row for each.
    """
    angles = [positions.float()[:, None] * inv_freq[..., None, :] for positions in (before, after)]  # rounded as there
    half = angles[1].double() - angles[0].double()
    by = torch.cat((half, half), -1)[..., None, :]  # [T, 1, D] or [L, T, 1, D]
    return rotate(keys.float(), by.cos().float(), by.sin().float()).to(keys.dtype)
