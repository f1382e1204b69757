"""The decoder of a family whose layers without a rope scale queries by their position (Llama 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.models.described import DescribedDecoder, DescribedLayer


@dataclass(frozen=True, eq=False, kw_only=True)
class TemperedLayer(DescribedLayer):
    """A layer without a rope."""

    @staticmethod
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries times their rows' factors [T, 1, 1], which come in place of angles."""
        return (q * cos).to(q.dtype), k


@dataclass(frozen=True, eq=False, kw_only=True)
class TemperedDecoder(DescribedDecoder):
    """A decoder of such layers and others."""

    def rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        how = self.config.description.temperature
        assert how is not None
        steps = torch.floor((positions.float() + 1) / how.floor)
        factors = (torch.log1p(steps) * how.scale + 1)[:, None, None]
        layers = zip(self.layers, super().rotations(positions), strict=True)
        return [(factors, factors) if isinstance(layer, TemperedLayer) else own for layer, own in layers]
