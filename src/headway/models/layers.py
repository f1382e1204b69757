"""One decoder layer: weights and the two row-wise halves around attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.reference.linear import linear
from headway.kernels.reference.mlp import gated_silu
from headway.kernels.reference.norm import rms_norm
from headway.kernels.reference.rope import rotate


@dataclass(frozen=True, eq=False)
class Linear:
    """A weight [N, K] and its bias [N] or none."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """The weights of one decoder layer; q, k and v are stacked in one matrix, gate and up in another."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.eps)

    def norm_in(self, x: Tensor) -> tuple[Tensor]:
        return (self.norm(x, self.input_norm),)

    def project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [R, E] → q [R, H, D], k and v [R, Hkv, D], before rotation."""
        q, k, v = (
            self.qkv(h).unflatten(-1, (-1, self.head_dim)).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.norm(q, self.q_norm), self.norm(k, self.k_norm)
        return q, k, v

    @staticmethod
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def project_out(self, x: Tensor, mixed: Tensor) -> tuple[Tensor]:
        """The residual x [R, E] plus the projected attention mixed [R, H, D]."""
        return (x + self.out(mixed.flatten(1)),)

    def norm_mlp(self, x: Tensor) -> tuple[Tensor]:
        return (self.norm(x, self.mlp_norm),)

    def feed_forward(self, x: Tensor, h: Tensor, *, exact: bool) -> tuple[Tensor]:
        return (x + self.down(self.gated(self.gate_up(h), exact=exact)),)

    def gated(self, gate_up: Tensor, *, exact: bool) -> Tensor:
        return gated_silu(gate_up, exact=exact)


def fused(parts: list[Tensor]) -> Tensor:
    """Matrices of one width stacked into one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
