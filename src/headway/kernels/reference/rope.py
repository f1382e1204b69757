"""Rotary position embedding, in the half-split layout: dimension i pairs with i + D/2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """How positions become angles. `kind` is one of default, linear, llama3, yarn, longrope."""

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] | None = None  # longrope's divisors of the frequencies

    @property
    def scale(self) -> float:
        """The factor on cos and sin (yarn's attention temperature)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self.factor, self.mscale) / _yarn_scale(self.factor, self.mscale_all_dim)
        return _yarn_scale(self.factor, 1.0)


def frequencies(rope: Rope) -> Tensor:
    """Angle per position for each pair of dimensions: [D/2] float32."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim))
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope)
        case "longrope":
            return plain / torch.tensor(rope.factors)
    raise AssertionError(rope.kind)


def rotation(inv_freq: Tensor, positions: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every row's angles: positions [T] → two [T, 1, D]."""
    angles = positions.float()[:, None] * inv_freq[None, :]  # [T, D/2]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]  # [T, 1, D]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] rotated by its row's angles. Dimensions past the width of cos stay unchanged."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    half = width // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    turned = turned * cos + swapped * sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def turn(keys: Tensor, inv_freq: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Keys [L, T, Hkv, D] that were rotated for positions `before` [T], as they would be for `after` [T].

    inv_freq [D/2] is for all layers, [L, D/2] has a row for each.
    """
    angles = [positions.float()[:, None] * inv_freq[..., None, :] for positions in (before, after)]  # rounded as there
    half = angles[1].double() - angles[0].double()
    by = torch.cat((half, half), -1)[..., None, :]  # [T, 1, D] or [L, T, 1, D]
    return rotate(keys.float(), by.cos().float(), by.sin().float()).to(keys.dtype)


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    wavelength = 2 * math.pi / plain
    low = rope.original_positions / rope.low_freq_factor
    high = rope.original_positions / rope.high_freq_factor
    slow = torch.where(wavelength > low, plain / rope.factor, plain)
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * slow / rope.factor + smooth * slow
    between = ~(wavelength < high) & ~(wavelength > low)
    return torch.where(between, blended, slow)


def _yarn(plain: Tensor, rope: Rope) -> Tensor:
    def dimension(rotations: float) -> float:
        return (rope.dim * math.log(rope.original_positions / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return plain / rope.factor * (1 - keep) + plain * keep


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
