"""A feed-forward of experts on a CUDA device: the same launches whatever the routing, so that graphs hold it."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton import experts, fused
from headway.kernels.triton.adapters import expert_lora
from headway.kernels.triton.experts import ExpertBlocks, ExpertGate, ExpertOperand, Routes
from headway.kernels.triton.launch import shared_memory
from headway.kernels.triton.matmul import MatmulTile
from headway.models.described import DescribedLayer
from headway.models.description import Experts
from headway.models.experts import ExpertWeights, GroupedExperts
from headway.models.layers import Linear
from headway.models.quantized.fp4 import Fp4Experts
from headway.runtime.runners.cuda.adapters import StepTiles
from headway.runtime.runners.cuda.buffers import ExpertBuffers
from headway.runtime.runners.cuda.matmuls import Matmuls

ONE_BY_ONE = 0.5  # times the experts: so many pairs of rows and experts, or fewer, are multiplied one by one


@dataclass(frozen=True, eq=False)
class CudaExperts:
    """The experts of a model's layers."""

    what: Experts
    activation: str
    matmuls: Matmuls

    def feed_forward(
        self, l: int, layer: DescribedLayer, h: Tensor, out: Tensor, room: ExpertBuffers, *, adapters: StepTiles | None
    ) -> None:
        """What the experts of a layer make of rows h [R, E], into `out` [R, E]."""
        weights, n, ahead = layer.experts, len(h), self.matmuls.ahead
        assert weights is not None
        pairs, routes, weighted = (
            n * self.what.per_token,
            self._route(l, weights, h, room, adapters),
            self.what.sigmoid_inputs,
        )
        tile = self._tile(pairs, h.dtype)
        by = None
        if pairs > ONE_BY_ONE * self.what.count:
            blocks = experts.most_blocks(pairs, self.what.count, tile.rows)
            by = ExpertBlocks(room.order[:pairs], room.blocks[:blocks])
            experts.sort_by_expert(routes.chosen, self.what.count, by, tile.rows, ahead=ahead)
        inner, parts, up, down = room.inner[:pairs], room.parts[:pairs], _matrices(layer.gate_up), _matrices(layer.down)
        gate = ExpertGate(self.activation, self.what.clamp, self.what.alpha)
        if added := self.matmuls.expert_terms(l, "expert_gate_up", adapters):
            # In float32, as a gated matmul has them: what other rows are does not change a row by more than that.
            gate_up = torch.empty(pairs, 2 * inner.shape[1], dtype=torch.float32, device=h.device)
            experts.expert_matmul(h, up, gate_up, routes, tile, by=by, weighted=weighted, ahead=ahead)
            for term in added:
                expert_lora.add_low_rank(h, gate_up, routes, term, weighted=weighted, ahead=ahead)
            expert_lora.gated(gate_up, inner, gate, ahead=ahead)
        else:
            experts.expert_matmul(h, up, inner, routes, tile, by=by, gate=gate, weighted=weighted, ahead=ahead)
        experts.expert_matmul(inner, down, parts, routes, tile, by=by, ahead=ahead)
        for term in self.matmuls.expert_terms(l, "expert_down", adapters):
            expert_lora.add_low_rank(inner, parts, routes, term, ahead=ahead)
        shared, shared_gate = self._shared(l, layer, h, room, adapters)
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
        self.matmuls.adapted((l, "router"), h, weights.router, logits, adapters)
        experts.route(logits, routes, normalize=what.normalize, sigmoid=what.sigmoid_inputs, ahead=ahead)
        return routes

    def _tile(self, pairs: int, dtype: torch.dtype) -> MatmulTile:
        """The tile of these pairs; one for all in deterministic mode."""
        each = 0.0 if self.matmuls.deterministic else pairs / self.what.count
        return experts.pick_expert_tile(each, dtype, shared_memory(self.matmuls.device))

    def _shared(
        self, l: int, layer: DescribedLayer, h: Tensor, room: ExpertBuffers, adapters: StepTiles | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the shared expert makes of rows, and its gate before the sigmoid."""
        weights, n = layer.experts, len(h)
        if weights is None or weights.shared_gate_up is None or weights.shared_down is None:
            return None, None
        gate_up, inner, shared = room.shared_gate_up[:n], room.shared_inner[:n], room.shared[:n]
        self.matmuls.adapted((l, "shared_gate_up"), h, weights.shared_gate_up, gate_up, adapters)
        fused.gated(gate_up, inner, kind=self.activation, ahead=self.matmuls.ahead)
        self.matmuls.adapted((l, "shared_down"), inner, weights.shared_down, shared, adapters)
        if weights.shared_router is None:
            return shared, None
        self.matmuls.adapted((l, "shared_router"), h, weights.shared_router, room.shared_gate[:n], adapters)
        return shared, room.shared_gate[:n]


def _matrices(w: Linear | Fp4Experts) -> ExpertOperand:
    """As the kernel takes them."""
    return ExpertOperand(w.codes, w.bias, w.scales) if isinstance(w, Fp4Experts) else ExpertOperand(w.weight, w.bias)
