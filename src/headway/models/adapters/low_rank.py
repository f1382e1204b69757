"""The two matrices of one LoRA target, and the names of targets.

A target is a linear layer as files have them: its layer's number, or `OUTSIDE` of layers, and its name there; or the
output matrix (`HEAD`). Layers that are called as Llama's have a role (`ROLES`) for a name. What another family's names
mean is in `modules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from headway.base.arrays import float_name, widen
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile
from headway.base.specs.adapters import OUTSIDE
from headway.base.text import short_repr

ROLES = ("q", "k", "v", "o", "gate", "up", "down")
MODULES: Mapping[str, str] = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
MAX_LAYERS = 1 << 12
MAX_RANK = 1024
MAX_BYTES = 8 << 30
MAX_SCALING = 1e30


class Target(NamedTuple):
    """A linear layer of a decoder: the number of its layer, and its role or what files call it."""

    layer: int
    part: str

    def __str__(self) -> str:
        if self == HEAD:
            return HEAD_MODULE
        return self.module if self.layer == OUTSIDE else f"layers.{self.layer}.{self.module}"

    @property
    def module(self) -> str:
        """Its name after the layer's, in a folder."""
        return next((name for name, role in MODULES.items() if role == self.part), self.part)


HEAD, HEAD_MODULE = Target(OUTSIDE, "head"), "lm_head"


@dataclass(frozen=True, eq=False)
class LowRank:
    """What is added to a target's output: scaling × B (A x). Of all experts both have a leading dimension for them."""

    a: np.ndarray  # [r, K], or [X, r, K]
    b: np.ndarray  # [N, r], or [X, N, r]
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def experts(self) -> int:
        """How many experts it has matrices for, 0 where it is for one matrix."""
        return len(self.a) if self.a.ndim == 3 else 0

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def delta(self) -> np.ndarray:
        """The matrix [N, K] that would be added to the weight, in float32."""
        return self.scaling * (widen(self.b) @ widen(self.a))


@dataclass(frozen=True)
class Limits:
    """How large an adapter may be."""

    rank: int = MAX_RANK
    nbytes: int = MAX_BYTES

    def check_bytes(self, what: str, nbytes: int) -> None:
        if nbytes > self.nbytes:
            raise BadModelFile(f"{what} has {nbytes} bytes; the limit for an adapter is {self.nbytes}")

    @staticmethod
    def check_scaling(what: str, scaling: float) -> float:
        """The scaling, if float32 can hold it."""
        if not abs(scaling) <= MAX_SCALING:
            raise BadModelFile(f"{what} has the scaling {scaling:g}; its size must be at most {MAX_SCALING:g}")
        return scaling

    def check(self, what: str, a: np.ndarray, b: np.ndarray, *, experts: bool = False) -> None:
        """Raise unless these are finite matrices [r, K] and [N, r] of a rank within the limit; of all experts, with a
        leading dimension for them."""
        for side, tensor in (("A", a), ("B", b)):
            if tensor.ndim != 2 + experts:
                needed = "a matrix for each expert" if experts else "a matrix"
                raise BadModelFile(f"{what}: {side} has shape {list(tensor.shape)}; {needed} is needed")
            if float_name(tensor) is None:
                raise BadModelFile(f"{what}: {side} is stored as {tensor.dtype}; floats are needed")
        if experts and len(a) != len(b):
            raise BadModelFile(f"{what}: A is for {len(a)} experts and B for {len(b)}; they must be equal")
        rank = a.shape[-2]
        if rank != b.shape[-1]:
            raise BadModelFile(f"{what}: A has rank {rank} and B has rank {b.shape[-1]}; they must be equal")
        if not 1 <= rank <= self.rank:
            raise BadModelFile(f"{what} has rank {rank}; it must be in [1, {self.rank}]")
        for side, tensor in (("A", a), ("B", b)):
            if not np.isfinite(widen(tensor)).all():
                raise BadModelFile(f"{what}: {side} has a value that is not a finite number; save it again")


def check_layer(layer: str, what: str) -> int:
    """The number of a layer in a tensor's name."""
    if len(layer) > 6 or int(layer) >= MAX_LAYERS:
        raise BadModelFile(f"{what} names layer {short_repr(layer)}; layers go from 0 to {MAX_LAYERS - 1}")
    return int(layer)


def digest(pairs: Mapping[Target, LowRank], *facts: str) -> str:
    """A strong hash of the weights: two adapters with the same one compute the same."""
    total = blake2b(repr(facts).encode(), digest_size=32, person=b"headway-adapter")
    for target in sorted(pairs):
        pair = pairs[target]
        for tensor in (pair.a, pair.b):
            total.update(repr((target, tensor.shape, f"torch.{float_name(tensor)}", pair.scaling)).encode())
            total.update(np.ascontiguousarray(tensor).view(np.uint8).data)
    return total.hexdigest()
