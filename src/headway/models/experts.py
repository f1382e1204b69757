"""The feed-forward of experts: every chosen expert of every row, each expert's rows in one matmul."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.reference.experts import grouped_linear, route
from headway.kernels.reference.mlp import activate
from headway.models.description import Experts
from headway.models.layers import Linear


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """What a layer of experts has besides their matrices."""

    what: Experts
    router: Linear  # [X, E]
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    shared_router: Linear | None = None  # [1, E]

    def __call__(self, h: Tensor, gate_up: Linear, down: Linear, activation: str, *, exact: bool) -> Tensor:
        """h [R, E] → the weighted sum of its experts' outputs [R, E]; gate_up [X, 2F, E], down [X, E, F].

        With `exact` every matmul has as many rows as h, so that a row's bits do not depend on where the others go.
        """
        chosen, weights = route(self.router(h), self.what.per_token, normalize=self.what.normalize)  # [R, k]
        order = chosen.flatten().argsort(stable=True)  # [R × k], by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.what.count).tolist()
        tile = len(h) if exact else None
        rows = h[order // self.what.per_token]
        inner = self._gated(grouped_linear(rows, gate_up.weight, gate_up.bias, counts, tile), activation, exact)
        parts = torch.empty(len(order), h.shape[1], dtype=h.dtype, device=h.device)
        parts[order] = grouped_linear(inner, down.weight, down.bias, counts, tile)
        parts = parts.unflatten(0, chosen.shape) * weights.to(h.dtype)[..., None]  # [R, k, E]
        total = parts[:, 0]
        for i in range(1, self.what.per_token):  # in one order, whatever the other rows
            total = total + parts[:, i]
        return self._plus_shared(h, total, activation, exact)

    def _gated(self, gate_up: Tensor, activation: str, exact: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        limit = self.what.clamp
        if limit is None:
            return activate(gate, activation, exact=exact) * up
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate / (1 + torch.exp(-self.what.alpha * gate)))

    def _plus_shared(self, h: Tensor, total: Tensor, activation: str, exact: bool) -> Tensor:
        if self.shared_gate_up is None or self.shared_down is None or self.shared_router is None:
            return total
        gate, up = self.shared_gate_up(h).chunk(2, dim=-1)
        shared = self.shared_down(activate(gate, activation, exact=exact) * up)
        return total + shared / (1 + torch.exp(-self.shared_router(h)))

    @property
    def nbytes(self) -> int:
        parts = (self.router, self.shared_gate_up, self.shared_down, self.shared_router)
        return sum(part.nbytes for part in parts if part is not None)
