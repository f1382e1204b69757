"""A feed-forward of experts on a CUDA device: the same launches whatever the routing, so that graphs hold it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.expert_form import ExpertForm
from headway.kernels.triton import fused
from headway.kernels.triton.adapters import expert_lora
from headway.kernels.triton.experts import matmul as experts
from headway.kernels.triton.experts import rows as expert_rows
from headway.kernels.triton.experts.matmul import ExpertBlocks, ExpertGate, ExpertOperand, Routes
from headway.kernels.triton.experts.quantized import StripTile, pick_strip_tile, strip_add_down, strip_matmul, takes
from headway.kernels.triton.experts.rows import Router
from headway.kernels.triton.launch import shared_memory
from headway.kernels.triton.matmul import MatmulTile
from headway.kernels.triton.matvec import RmsNorm
from headway.models.described import DescribedLayer
from headway.models.description import Experts
from headway.models.experts import ExpertWeights, GroupedExperts, ScaledExperts
from headway.models.layers import Linear
from headway.models.quantized.fp4 import Fp4Experts
from headway.models.quantized.int_experts import IntExperts
from headway.models.variants.per_layer import ExpertsBeside
from headway.runtime.runners.cuda.adapters import StepTiles
from headway.runtime.runners.cuda.buffers import ExpertBuffers
from headway.runtime.runners.cuda.matmuls import Matmuls

MOST_ROUTED = 1024  # experts that one row may be routed to with its norm
ONE_BY_ONE = 0.5  # times the experts: so many pairs of rows and experts, or fewer, are multiplied one by one


@dataclass(frozen=True, eq=False)
class CudaExperts:
    """The experts of a model's layers."""

    what: Experts
    activation: str
    matmuls: Matmuls

    def feed_forward(
        self,
        l: int,
        layer: DescribedLayer | ExpertsBeside,
        h: Tensor,
        out: Tensor,
        room: ExpertBuffers,
        *,
        adapters: StepTiles | None,
        reads: Tensor | None = None,
    ) -> None:
        """What the experts of a layer make of rows h [R, E], into `out` [R, E]; the router may read others."""
        weights, n, ahead = layer.experts, len(h), self.matmuls.ahead
        assert weights is not None
        pairs, weighted = n * self.what.per_token, self.what.sigmoid_inputs
        routes = self._route(l, weights, h if reads is None else reads, room, adapters)
        tile, by = self._tile(pairs, layer, h.dtype), None
        if pairs > ONE_BY_ONE * self.what.count:
            blocks = experts.most_blocks(pairs, self.what.count, tile.rows)
            by = ExpertBlocks(room.order[:pairs], room.blocks[:blocks])
            experts.sort_by_expert(routes.chosen, self.what.count, by, tile.rows, ahead=ahead)
        x, by_pair = h, weighted
        if weighted and isinstance(tile, StripTile):
            x, by_pair = (h.unsqueeze(1) * routes.weights.to(h.dtype).unsqueeze(2)).flatten(0, 1), False
        inner, parts, up, down = room.inner[:pairs], room.parts[:pairs], _matrices(layer.gate_up), _matrices(layer.down)
        how: dict[str, Any] = {"by": by, "ahead": ahead}
        if added := self.matmuls.expert_terms(l, "expert_gate_up", adapters):
            # In float32, as a gated matmul has them: what other rows are does not change a row by more than that.
            gate_up = torch.empty(pairs, 2 * inner.shape[1], dtype=torch.float32, device=h.device)
            _matmul(x, up, gate_up, routes, tile, weighted=by_pair, **how)
            for term in added:
                expert_lora.add_low_rank(h, gate_up, routes, term, weighted=weighted, ahead=ahead)
            expert_lora.gated(gate_up, inner, self._gate, ahead=ahead)
        else:
            _matmul(x, up, inner, routes, tile, gate=self._gate, weighted=by_pair, **how)
        _matmul(inner, down, parts, routes, tile, **how)
        for term in self.matmuls.expert_terms(l, "expert_down", adapters):
            expert_lora.add_low_rank(inner, parts, routes, term, ahead=ahead)
        shared, shared_gate = self._shared(l, weights, h, room, adapters)
        experts.combine(parts, routes, out, weighted=not weighted, shared=shared, shared_gate=shared_gate, ahead=ahead)

    def _route(
        self, l: int, weights: ExpertWeights, h: Tensor, room: ExpertBuffers, adapters: StepTiles | None
    ) -> Routes:
        """The experts of rows h, and their weights."""
        n, what, ahead = len(h), self.what, self.matmuls.ahead
        logits, routes = room.logits[:n], Routes(room.chosen[:n], room.weights[:n])
        if isinstance(weights, GroupedExperts):
            self.matmuls.widened(h, weights.router.weight, logits)
            self.matmuls.low_rank((l, "router"), h, logits, adapters)
            experts.route_by_groups(logits, routes, **weights.routing(), ahead=ahead)
            return routes
        self.matmuls.project((l, "router"), h, weights.router, logits, adapters)
        if isinstance(weights, ScaledExperts):
            how: dict[str, Any] = {"score": "softmax", "groups": 1, "kept": 1, "best": 1, "correction": None}
            how |= {"normalize": what.normalize, "scale": 1.0, "each": weights.expert_scale}
            experts.route_by_groups(logits, routes, **how, ahead=ahead)
            return routes
        experts.route(logits, routes, normalize=what.normalize, sigmoid=what.sigmoid_inputs, ahead=ahead)
        return routes

    def takes_one_row(self, layer: DescribedLayer) -> bool:
        """Whether `one_row` computes a layer."""
        what, floats = self.what, all(isinstance(w, Linear) for w in (layer.gate_up, layer.down))
        fits = floats or _tensor_core_form(layer, self.matmuls.dtype) is not None
        plain = what.groups is None and not what.sigmoid_inputs and what.shared_size == 0 and what.count <= MOST_ROUTED
        return layer.experts is not None and plain and fits and not self.matmuls.deterministic

    def one_row(self, layer: DescribedLayer, x: Tensor, norm: RmsNorm, h: Tensor, room: ExpertBuffers) -> None:
        """Add to a row x [1, E] what a layer's experts make of its norm, which goes into h [1, E]."""
        weights, ahead = layer.experts, self.matmuls.ahead
        assert weights is not None
        routes, inner = Routes(room.chosen[:1], room.weights[:1]), room.inner[: self.what.per_token]
        router = Router(weights.router.weight, weights.router.bias, room.logits[0], room.arrived, self.what.normalize)
        expert_rows.norm_and_route(x[0], norm, h[0], router, routes, ahead=ahead)
        up, down = _matrices(layer.gate_up), _matrices(layer.down)
        if up.form is None:
            expert_rows.gate_times_up(h, up, inner, routes, self._gate, ahead=ahead)
            expert_rows.add_down(inner, down, x[0], routes, ahead=ahead)
        else:
            strip_matmul(h, up, inner, routes, pick_strip_tile(0.0, up.form), gate=self._gate, ahead=ahead)
            strip_add_down(inner, down, x[0], routes, ahead=ahead)

    @property
    def _gate(self) -> ExpertGate:
        return ExpertGate(self.activation, self.what.clamp, self.what.alpha)

    def _tile(self, pairs: int, layer: DescribedLayer | ExpertsBeside, dtype: torch.dtype) -> MatmulTile | StripTile:
        """The tile of these pairs; one for all in deterministic mode."""
        each = 0.0 if self.matmuls.deterministic else pairs / self.what.count
        if (form := _tensor_core_form(layer, dtype)) is not None:
            return pick_strip_tile(each, form, deterministic=self.matmuls.deterministic)
        return experts.pick_expert_tile(each, dtype, shared_memory(self.matmuls.device))

    def _shared(
        self, l: int, weights: ExpertWeights, h: Tensor, room: ExpertBuffers, adapters: StepTiles | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the shared expert makes of rows, and its gate before the sigmoid."""
        n = len(h)
        if weights.shared_gate_up is None or weights.shared_down is None:
            return None, None
        gate_up, inner, shared = room.shared_gate_up[:n], room.shared_inner[:n], room.shared[:n]
        self.matmuls.adapted((l, "shared_gate_up"), h, weights.shared_gate_up, gate_up, adapters)
        fused.gated(gate_up, inner, kind=self.activation, ahead=self.matmuls.ahead)
        self.matmuls.adapted((l, "shared_down"), inner, weights.shared_down, shared, adapters)
        if weights.shared_router is None:
            return shared, None
        self.matmuls.adapted((l, "shared_router"), h, weights.shared_router, room.shared_gate[:n], adapters)
        return shared, room.shared_gate[:n]


def _matmul(
    x: Tensor,
    w: ExpertOperand,
    y: Tensor,
    routes: Routes,
    tile: MatmulTile | StripTile,
    *,
    weighted: bool = False,
    **how: Any,
) -> None:
    """Rows by the matrices of their experts, by the kernel that has such tiles."""
    if isinstance(tile, StripTile):
        assert not weighted
        strip_matmul(x, w, y, routes, tile, **how)
    else:
        experts.expert_matmul(x, w, y, routes, tile, weighted=weighted, **how)


def _tensor_core_form(layer: DescribedLayer | ExpertsBeside, dtype: torch.dtype) -> ExpertForm | None:
    """How a layer's experts are quantized, if kernels on tensor cores take all; where down differs, as that is."""
    forms = [_matrices(w).form for w in (layer.gate_up, layer.down)]
    return forms[1] if all(form is not None and takes(form, dtype) for form in forms) else None


def _matrices(w: Linear | Fp4Experts | IntExperts) -> ExpertOperand:
    """As the kernels take them."""
    if isinstance(w, Linear):
        return ExpertOperand(w.weight, w.bias)
    return ExpertOperand(w.words, w.bias, w.form, w.scales, w.halves, w.exponent, w.gated)
