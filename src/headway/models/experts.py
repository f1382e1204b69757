"""The feed-forward of experts: every chosen expert of every row, each expert's rows in one matmul."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.experts import grouped_linear, route, route_by_groups
from headway.kernels.reference.linear import linear
from headway.kernels.reference.lora import Delta, plus
from headway.kernels.reference.mlp import activate
from headway.kernels.reference.norm import unit_norm
from headway.models.description import Experts
from headway.models.layers import Linear


class Adding(Protocol):
    """The adapters of a step's rows: see `RowAdapters`."""

    def delta(self, layer: int, stack: str, x: Tensor, rows: Tensor | None = None) -> Delta | None: ...

    def expert_delta(self, layer: int, stack: str, x: Tensor, rows: Tensor, experts: Tensor) -> Delta | None: ...


@dataclass(frozen=True, eq=False)
class LayerAdapters:
    """What adapters add to the matmuls of one layer, or outside of them, for these rows of the step."""

    adapters: Adding
    layer: int
    rows: Tensor | None = None  # [R]

    def of(self, rows: Tensor) -> LayerAdapters:
        """The same for these rows."""
        return replace(self, rows=rows)

    def delta(self, stack: str, x: Tensor) -> Delta | None:
        return self.adapters.delta(self.layer, stack, x, self.rows)

    def expert_delta(self, stack: str, x: Tensor, places: Tensor, experts: Tensor) -> Delta | None:
        """Of x [N, K], whose rows are at these places among the rows and go to these experts."""
        assert self.rows is not None
        return self.adapters.expert_delta(self.layer, stack, x, self.rows[places], experts)


def adding(adapters: Adding | None, layer: int, x: Tensor) -> tuple[LayerAdapters | None, tuple[Tensor, ...]]:
    """What adapters add to the matmuls of a layer, and the rows of the step x that go with x through `by_rows`."""
    if adapters is None:
        return None, ()
    return LayerAdapters(adapters, layer), (torch.arange(len(x), device=x.device),)


def of_rows(added: LayerAdapters | None, *rows: Tensor) -> LayerAdapters | None:
    """The same for these rows, as `by_rows` gives them."""
    return None if added is None else added.of(*rows)


def with_added(y: Tensor, added: LayerAdapters | None, stack: str, x: Tensor) -> Tensor:
    """What a matmul made of rows x, and what adapters add to it."""
    return y if added is None else plus(y, added.delta(stack, x))


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """What a layer of experts has besides their matrices."""

    what: Experts
    router: Linear  # [X, E]
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    shared_router: Linear | None = None  # [1, E]

    def __call__(
        self,
        h: Tensor,
        gate_up: Linear,
        down: Linear,
        activation: str,
        *,
        exact: bool,
        added: LayerAdapters | None = None,
    ) -> Tensor:
        """h [R, E] → the weighted sum of its experts' outputs [R, E]; gate_up [X, 2F, E], down [X, E, F].

        With `exact` every matmul has as many rows as h, so that a row's bits do not depend on where the others go.
        """
        return self.mix(h, self.route(h, added), gate_up, down, activation, exact=exact, added=added)

    def mix(
        self,
        h: Tensor,
        routes: tuple[Tensor, Tensor],
        gate_up: Linear,
        down: Linear,
        activation: str,
        *,
        exact: bool,
        added: LayerAdapters | None = None,
    ) -> Tensor:
        """The same with the experts that are chosen and their weights, both [R, k]."""
        chosen, weights = routes
        order = chosen.flatten().argsort(stable=True)  # [R × k], by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.what.count).tolist()
        tile, places, experts = len(h) if exact else None, order // self.what.per_token, chosen.flatten()[order]

        def matmul(x: Tensor, matrices: Linear, stack: str) -> Tensor:
            y = self.by_expert(x, matrices, counts, tile)
            return y if added is None else plus(y, added.expert_delta(stack, x, places, experts))

        rows = self.inputs(h[places], weights.flatten()[order])
        inner = self._gated(matmul(rows, gate_up, "expert_gate_up"), activation, exact)
        parts = torch.empty(len(order), h.shape[1], dtype=h.dtype, device=h.device)
        parts[order] = matmul(inner, down, "expert_down")
        parts = self.outputs(parts.unflatten(0, chosen.shape), weights)  # [R, k, E]
        total = parts[:, 0]
        for i in range(1, self.what.per_token):  # in one order, whatever the other rows
            total = total + parts[:, i]
        return self._plus_shared(h, total, activation, exact, added)

    def route(self, h: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each row and their weights."""
        return route(self.logits(h, added), self.what.per_token, normalize=self.what.normalize)

    def logits(self, h: Tensor, added: LayerAdapters | None) -> Tensor:
        """What the router makes of rows."""
        return with_added(self.router(h), added, "router", h)

    def inputs(self, rows: Tensor, weights: Tensor) -> Tensor:
        """What experts make outputs of, of rows [N, E] with weights [N]."""
        return rows

    def outputs(self, parts: Tensor, weights: Tensor) -> Tensor:
        """What is summed over experts, of their outputs [R, k, E] with weights [R, k]."""
        return parts * weights.to(parts.dtype)[..., None]

    def by_expert(self, rows: Tensor, matrices: Linear, counts: list[int], tile: int | None) -> Tensor:
        """Rows in the order of their experts, `counts` of each, by their experts' matrices."""
        return grouped_linear(rows, matrices.weight, matrices.bias, counts, tile)

    def activate(self, x: Tensor, activation: str, exact: bool) -> Tensor:
        return activate(x, activation, exact=exact)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def _gated(self, gate_up: Tensor, activation: str, exact: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        limit = self.what.clamp
        if limit is None:
            return self.activate(gate, activation, exact) * up
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate / (1 + self.exp(-self.what.alpha * gate)))

    def _plus_shared(
        self, h: Tensor, total: Tensor, activation: str, exact: bool, added: LayerAdapters | None
    ) -> Tensor:
        if self.shared_gate_up is None or self.shared_down is None:
            return total
        gate, up = with_added(self.shared_gate_up(h), added, "shared_gate_up", h).chunk(2, dim=-1)
        inner = self.activate(gate, activation, exact) * up
        shared = with_added(self.shared_down(inner), added, "shared_down", inner)
        if self.shared_router is None:
            return total + shared
        return total + shared / (1 + self.exp(-with_added(self.shared_router(h), added, "shared_router", h)))

    @property
    def nbytes(self) -> int:
        parts = (self.router, self.shared_gate_up, self.shared_down, self.shared_router)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, eq=False)
class GroupedExperts(ExpertWeights):
    """Experts that are chosen by groups, in float32 whatever the model computes in."""

    correction: Tensor | None = None  # [X] float32

    def route(self, h: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor, Tensor]:
        return route_by_groups(self.logits(h, added), self.what.per_token, **self.routing())

    def logits(self, h: Tensor, added: LayerAdapters | None) -> Tensor:
        return with_added(linear(h.float(), self.router.weight.float()), added, "router", h)

    def routing(self) -> dict[str, Any]:
        """How `route_by_groups` chooses."""
        how = self.what.groups
        assert how is not None
        groups = {"groups": how.count, "kept": how.kept, "best": how.best}
        return {
            **groups,
            "score": how.score,
            "correction": self.correction,
            "normalize": self.what.normalize,
            "scale": how.scale,
        }


@dataclass(frozen=True, eq=False)
class ScaledExperts(ExpertWeights):
    """Experts whose router norms and scales what it reads, and whose weights are each times its expert's number."""

    router_scale: Tensor = field(kw_only=True)  # [E]
    expert_scale: Tensor = field(kw_only=True)  # [X]
    eps: float = field(kw_only=True)

    def route(self, h: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor, Tensor]:
        scaled = self.unit(h) * self.router_scale * h.shape[-1] ** -0.5
        chosen, weights = super().route(scaled, added)
        return chosen, weights * self.expert_scale[chosen]

    def unit(self, h: Tensor) -> Tensor:
        return unit_norm(h, self.eps)


@dataclass(frozen=True, eq=False)
class InputWeightedExperts(ExpertWeights):
    """Experts whose inputs are weighted, each by the sigmoid of its logit."""

    def route(self, h: Tensor, added: LayerAdapters | None = None) -> tuple[Tensor, Tensor]:
        logits = self.logits(h, added)
        chosen, _ = route(logits, self.what.per_token, normalize=False)
        return chosen, 1 / (1 + self.exp(-logits.float().gather(1, chosen)))

    def inputs(self, rows: Tensor, weights: Tensor) -> Tensor:
        return rows * weights.to(rows.dtype)[:, None]

    def outputs(self, parts: Tensor, weights: Tensor) -> Tensor:
        return parts
