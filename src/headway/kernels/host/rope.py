"""Rotary position embedding: how positions become angles, and keys that move to another position."""

from __future__ import annotations

import math

import numpy as np

from headway.base.arrays import float_name, narrow, widen
from headway.base.dataclass import dataclass


@dataclass(frozen=True)
class Rope:
    """How positions become angles. `kind` is one of default, linear, llama3, yarn, longrope, proportional."""

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
    turned: int = 0  # proportional: the pairs that are rotated; the others have the angle 0

    @property
    def scale(self) -> float:
        """The factor on cos and sin (yarn's attention temperature)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_scale(self.factor, self.mscale) / yarn_scale(self.factor, self.mscale_all_dim)
        return yarn_scale(self.factor, 1.0)


def frequencies(rope: Rope) -> np.ndarray:
    """Angle per position for each pair of dimensions: [D/2] float32."""
    exponents = np.arange(0, rope.dim, 2).astype(np.float32) / np.float32(rope.dim)
    with np.errstate(over="ignore"):  # a period beyond float32 is endless: its angle stays 0
        periods = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)  # a power rounded once
    plain = np.float32(1) / periods
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / np.float32(rope.factor)
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope)
        case "longrope":
            return plain / np.array(rope.factors, np.float32)
        case "proportional":
            return np.where(np.arange(rope.dim // 2) < rope.turned, plain / np.float32(rope.factor), np.float32(0))
    raise AssertionError(rope.kind)


def rerotate(keys: np.ndarray, inv_freq: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Keys [L, T, Hkv, D] that were rotated for positions `before` [T], as they would be for `after` [T].

    inv_freq [D/2] is for all layers, [L, D/2] has a row for each.
    """
    angles = [positions.astype(np.float32)[:, None] * inv_freq[..., None, :] for positions in (before, after)]
    by = angles[1].astype(np.float64) - angles[0].astype(np.float64)  # of angles that are rounded as they were there
    by = np.concatenate((by, by), -1)[..., None, :]  # [T, 1, D] or [L, T, 1, D]
    name = float_name(keys)
    assert name is not None
    return narrow(_rotate(widen(keys), np.cos(by).astype(np.float32), np.sin(by).astype(np.float32)), name)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [L, T, H, D] rotated in its half-split layout: dimension i pairs with i + D/2; others stay unchanged."""
    width = cos.shape[-1]
    half, out = width // 2, x.copy()
    turned = x[..., :width]
    swapped = np.concatenate((-turned[..., half:], turned[..., :half]), -1)
    out[..., :width] = turned * cos + swapped * sin
    return out


def _llama3(plain: np.ndarray, rope: Rope) -> np.ndarray:
    wavelength = np.float32(2 * math.pi) / plain
    low = rope.original_positions / rope.low_freq_factor
    high = rope.original_positions / rope.high_freq_factor
    factor = np.float32(rope.factor)
    slow = np.where(wavelength > low, plain / factor, plain)
    if low == high:  # nothing is between (Llama 4 Scout)
        return slow.astype(np.float32)
    smooth = (np.float32(rope.original_positions) / wavelength - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * slow / factor + smooth * slow
    between = ~(wavelength < high) & ~(wavelength > low)
    return np.where(between, blended, slow).astype(np.float32)


def _yarn(plain: np.ndarray, rope: Rope) -> np.ndarray:
    def dimension(rotations: float) -> float:
        return (rope.dim * math.log(rope.original_positions / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    keep = 1 - ramp
    return (plain / np.float32(rope.factor) * (1 - keep) + plain * keep).astype(np.float32)


def yarn_scale(factor: float, mscale: float) -> float:
    """Yarn's attention temperature, for a context that is this many times longer."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
