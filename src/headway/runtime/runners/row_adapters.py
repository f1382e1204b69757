"""The adapters of a batch's rows: grouped by adapter, in one order, and as torch computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.base.adapters import AdapterMix
from headway.kernels.reference.lora import Delta, OrderedLowRank, Piece, RowGroup, low_rank
from headway.models.adapters.bound import BoundAdapter, stored_pair, target_shapes
from headway.models.config import ModelConfig
from headway.runtime.adapters import LoadedAdapter

STACKS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "out": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


class AdapterRows(NamedTuple):
    """Rows of a batch under one adapter, and its scale at each."""

    adapter: LoadedAdapter
    rows: list[int]
    scales: list[float]


def by_adapter(mixes: Sequence[AdapterMix | None]) -> list[AdapterRows]:
    """The rows of each adapter, adapters in the order of their hashes: a row's sum has the same order in any batch."""
    groups: dict[str, AdapterRows] = {}
    for row, mix in enumerate(mixes):
        for adapter, scale in () if mix is None else mix.uses:
            assert isinstance(adapter, LoadedAdapter)
            group = groups.setdefault(adapter.digest, AdapterRows(adapter, [], []))
            group.rows.append(row)
            group.scales.append(scale)
    return [group for _, group in sorted(groups.items())]


def has_head(mixes: Sequence[AdapterMix | None]) -> bool:
    """Whether an adapter of these changes the output matrix."""
    uses = (use for mix in mixes if mix is not None for use, _ in mix.uses)
    return any(isinstance(use, LoadedAdapter) and use.head is not None for use in uses)


def add_to_logits(logits: Tensor, h: Tensor, mixes: Sequence[AdapterMix | None]) -> list[int]:
    """Add what adapters of the head make of normed rows h [R, E] to logits [R, V], in place; the rows that changed.

    Every row is computed by itself, so that its bits depend on nothing else.
    """
    changed = set[int]()
    for adapter, rows, scales in by_adapter(mixes):
        if (head := adapter.head) is not None:
            changed.update(rows)
            for row, scale in zip(rows, scales, strict=True):
                logits[row] += torch.mv(head.b, torch.mv(head.a, h[row].float())) * (scale * head.factor)
    return sorted(changed)


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
                        a, b = (t.to(device, torch.float32) for t in (a, b))
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
