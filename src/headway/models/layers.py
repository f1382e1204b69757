"""One decoder layer: weights and the two row-wise halves around attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.linear import linear
from headway.kernels.reference.lora import Delta, plus
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
    """The weights of one decoder layer; q, k and v are stacked in one matrix, gate and up in another.

    A `delta` is what adapters add to a matmul's output, or to the residual that it was added to.
    """

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

    @property
    def softmax(self) -> Mapping[str, Any]:
        """What attention has besides its scale, as arguments of `attend`: a soft cap, sinks."""
        return {}

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.eps)

    def norm_in(self, x: Tensor) -> tuple[Tensor]:
        return (self.norm(x, self.input_norm),)

    def project(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """h [R, E] → q [R, H, D], k and v [R, Hkv, D], before rotation."""
        heads = plus(self.qkv(h), delta).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.norm(q, self.q_norm), self.norm(k, self.k_norm)
        return q, k, v

    @staticmethod
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def project_out(self, x: Tensor, mixed: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        """The residual x [R, E] plus the projected attention mixed [R, H, D]."""
        return (plus(x + self.out(mixed.flatten(1)), delta),)

    def norm_mlp(self, x: Tensor, before: Tensor) -> tuple[Tensor]:
        """The feed-forward's input, from the residual after attention; a parallel layer takes the one before."""
        return (self.norm(x, self.mlp_norm),)

    def feed_forward(self, x: Tensor, h: Tensor, *, exact: bool) -> tuple[Tensor]:
        return self.add_down(x, *self.gate_times_up(h, exact=exact))

    def gate_times_up(self, h: Tensor, delta: Delta | None = None, *, exact: bool) -> tuple[Tensor]:
        """h [R, E] → silu(gate) × up [R, F]."""
        return (self.gated(plus(self.gate_up(h), delta), exact=exact),)

    def add_down(self, x: Tensor, inner: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        return (plus(x + self.down(inner), delta),)

    def gated(self, gate_up: Tensor, *, exact: bool) -> Tensor:
        return gated_silu(gate_up, exact=exact)


def mapped(value: Any, change: Callable[[Tensor], Tensor], seen: dict[int, Any] | None = None) -> Any:
    """The same with every tensor changed, in tuples and dataclasses; what is shared stays shared."""
    seen = {} if seen is None else seen
    if id(value) not in seen:
        if isinstance(value, Tensor):
            seen[id(value)] = change(value)
        elif isinstance(value, tuple):
            parts = [mapped(each, change, seen) for each in value]
            seen[id(value)] = value if _all_same(parts, value) else tuple(parts)
        elif is_dataclass(value) and not isinstance(value, type):
            old = {each.name: getattr(value, each.name) for each in fields(value)}
            new = {name: mapped(each, change, seen) for name, each in old.items()}
            seen[id(value)] = value if _all_same(new.values(), old.values()) else replace(value, **new)
        else:
            return value
    return seen[id(value)]


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in tuples and dataclasses, in their order, each once."""
    tables: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        return tables.setdefault(id(tensor), tensor)

    mapped(value, note)
    return list(tables.values())


def _all_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def fused(parts: list[Tensor]) -> Tensor:
    """Matrices of one width stacked into one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
