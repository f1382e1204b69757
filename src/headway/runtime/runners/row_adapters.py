"""The adapters of a batch's rows as torch computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.base.adapters import AdapterMix
from headway.kernels.reference.lora import Delta, OrderedLowRank, Piece, RowGroup, low_rank
from headway.kernels.reference.quantized import tensor
from headway.models.adapters.bound import BoundAdapter, stored_pair, target_shapes
from headway.models.config import ModelConfig
from headway.runtime.runners.adapter_rows import by_adapter

STACKS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "out": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


@dataclass(frozen=True, eq=False)
class TorchAdapter:
    """An adapter's matrices in float32 by layer and stack."""

    layers: tuple[Mapping[str, Sequence[Piece]], ...]

    @classmethod
    def of(cls, adapter: BoundAdapter, config: ModelConfig, device: torch.device, *, half: bool) -> TorchAdapter:
        """With `half`, rounded to float16, as the adapters of quantized weights are."""
        outputs = {role: shape[0] for role, shape in target_shapes(config).items()}
        layers = []
        for pairs in adapter.layers:
            stacks: dict[str, list[Piece]] = {}
            for stack, roles in STACKS.items():
                first = 0
                for role in roles:
                    if (pair := pairs.get(role)) is not None:
                        a, b, factor = stored_pair(pair, half=half)
                        a, b = (tensor(t).to(device, torch.float32) for t in (a, b))
                        stacks.setdefault(stack, []).append(Piece(a, b, factor, first))
                    first += outputs.get(role, 0)
            layers.append(stacks)
        return cls(tuple(layers))

    @property
    def nbytes(self) -> int:
        return sum(p.a.nbytes + p.b.nbytes for layer in self.layers for pieces in layer.values() for p in pieces)


class TorchRowAdapters:
    """The adapters of a step for `Decoder.forward`."""

    def __init__(
        self,
        mixes: Sequence[AdapterMix | None],
        config: ModelConfig,
        device: torch.device,
        *,
        by_row: bool,
        ordered: bool,
    ) -> None:
        self._by_row, self._ordered, shapes = by_row, ordered, target_shapes(config)
        self._outputs = {stack: sum(shapes[r][0] for r in roles if r in shapes) for stack, roles in STACKS.items()}
        self._groups: list[tuple[RowGroup, TorchAdapter]] = []
        for adapter, rows, scales in by_adapter(mixes):
            assert isinstance(adapter.weights, TorchAdapter)
            group = RowGroup(torch.tensor(rows, device=device), torch.tensor(scales, device=device))
            self._groups.append((group, adapter.weights))

    def delta(self, layer: int, stack: str, x: Tensor) -> Delta | None:
        groups = [(group, weights.layers[layer].get(stack, ())) for group, weights in self._groups]
        groups = [(group, pieces) for group, pieces in groups if pieces]
        if not groups:
            return None
        if self._ordered:
            return OrderedLowRank(x, groups)
        return low_rank(x, self._outputs[stack], groups, by_row=self._by_row)
