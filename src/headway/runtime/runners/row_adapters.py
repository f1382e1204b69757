"""The adapters of a batch's rows as torch computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.specs.adapters import OUTSIDE, AdapterMix
from headway.kernels.reference.lora import Delta, Groups, OrderedLowRank, Piece, Reduce, RowGroup, low_rank
from headway.kernels.reference.quantized import tensor
from headway.models.adapters.bound import BoundAdapter, StoredPairs, layer_targets, stored_pair
from headway.models.config import ModelConfig
from headway.runtime.runners.adapter_rows import add_to_products, by_adapter

STACKS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v", "q_down", "kv_down"),
    "q_up": ("q_up",),
    "attention_gate": ("attention_gate",),
    "mix_in": ("mix_in", "mix_qkv", "mix_beta", "mix_step", "mix_gate"),
    "mix_out": ("mix_out",),
    "out": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "router": ("router",),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "shared_down": ("shared_down",),
    "shared_router": ("shared_router",),
    "input_gate": ("input_gate",),
    "input_out": ("input_out",),
    "laurel_down": ("laurel_down",),
    "laurel_up": ("laurel_up",),
    "altup_router": ("altup_router",),
    "altup_predict": ("altup_predict",),
    "altup_correct": ("altup_correct",),
}
OUTER_STACKS: Mapping[str, tuple[str, ...]] = {
    "input_projection": ("input_projection",),
    "altup_spread": ("altup_spread",),
    "altup_gather": ("altup_gather",),
}
EXPERT_STACKS: Mapping[str, tuple[str, ...]] = {
    "expert_gate_up": ("expert_gate", "expert_up"),
    "expert_down": ("expert_down",),
    "key_up": ("key_up",),
    "value_up": ("value_up",),
}
ALL_STACKS: Mapping[str, tuple[str, ...]] = {**STACKS, **EXPERT_STACKS, **OUTER_STACKS}


@dataclass(frozen=True, eq=False)
class TorchAdapter:
    """An adapter's matrices in float32 by layer and stack, or `stack.expert`, and those of the output matrix.

    What is outside of layers comes after the last; but each layer has its own part of `input_projection`.
    """

    layers: tuple[dict[str, list[Piece]], ...]
    outputs: tuple[dict[str, int], ...]  # of each layer's stacks
    head: Piece | None = None

    @classmethod
    def of(cls, adapter: BoundAdapter, config: ModelConfig, device: torch.device, *, half: bool) -> TorchAdapter:
        """With `half`, rounded to float16, as the adapters of quantized weights are."""
        layers, outputs = [], []
        stored = StoredPairs(lambda matrix, _: tensor(matrix).to(device, torch.float32), half=half)
        for l, pairs in zip((*range(config.layers), OUTSIDE), adapter.places, strict=True):
            shapes, stacks, sizes = layer_targets(config, l), dict[str, list[Piece]](), dict[str, int]()
            places = dict[str, tuple[str, int]]()  # of roles: their stack, and the outputs before them
            for stack, roles in ALL_STACKS.items():
                first = 0
                for role in roles:
                    places[role] = stack, first
                    first += shapes[role][0] if role in shapes else 0
                sizes[stack] = first
            for key in sorted(pairs, key=lambda key: places[key.partition(".")[0]][1]):
                role, dot, expert = key.partition(".")
                a, b, factor = stored.of(pairs[key])
                stack, first = places[role]
                stacks.setdefault(f"{stack}{dot}{expert}", []).append(Piece(a, b, factor, first))
            layers.append(stacks)
            outputs.append(sizes)
        _cut_by_layer(layers, outputs, "input_projection")
        return cls(tuple(layers), tuple(outputs), head_on(adapter, device))

    @property
    def nbytes(self) -> int:
        """Of the layers' matrices; `LoadedAdapter` counts the output matrix's."""
        pieces = (piece for layer in self.layers for stack in layer.values() for piece in stack)
        return sum({id(matrix): matrix.nbytes for piece in pieces for matrix in (piece.a, piece.b)}.values())


def _cut_by_layer(layers: list[dict[str, list[Piece]]], outputs: list[dict[str, int]], stack: str) -> None:
    """Give each layer its part of a matrix outside of them, which has those of all layers one after the other."""
    *inner, outer = layers
    size = outputs[OUTSIDE][stack] // len(inner)
    pieces = outer.pop(stack, [])
    for l, own in enumerate(inner):
        outputs[l][stack] = size
        if pieces:
            own[stack] = [piece._replace(b=piece.b[l * size : (l + 1) * size]) for piece in pieces]


def head_on(adapter: BoundAdapter, device: torch.device) -> Piece | None:
    """What an adapter adds to the logits, on a device."""
    if adapter.head is None:
        return None
    a, b, factor = stored_pair(adapter.head, half=False)
    return Piece(tensor(a).to(device), tensor(b).to(device), factor, 0)


def add_heads(products: Tensor, h: Tensor, mixes: Sequence[AdapterMix | None]) -> None:
    """Add what adapters of the output matrix make of normed rows h [R, E] to its products [R, V], in place.

    Every row is computed by itself: its bits depend on nothing else, and on a CPU are those of the native step.
    """
    if products.device.type == "cpu":
        add_to_products(products.numpy(), h.float().numpy(), mixes)
        return
    for adapter, rows, scales in by_adapter(mixes):
        head: Piece | None = getattr(adapter.weights, "head", None)
        if head is not None:
            for row, scale in zip(rows, scales, strict=True):
                products[row] += (head.b @ (head.a @ h[row].float())) * (scale * head.factor)


class TorchRowAdapters:
    """The adapters of a step for `Decoder.forward`."""

    def __init__(
        self,
        mixes: Sequence[AdapterMix | None],
        device: torch.device,
        *,
        by_row: bool,
        ordered: bool,
        reduce: Reduce | None = None,
    ) -> None:
        """`reduce` sums over ranks what A makes of inputs that are split over them: those of out and down."""
        self._by_row, self._ordered, self._reduce = by_row, ordered, reduce
        self._groups: list[tuple[RowGroup, TorchAdapter]] = []
        self._scales: list[Tensor] = []  # of each group [T]: NaN for other rows
        for adapter, rows, scales in by_adapter(mixes):
            assert isinstance(adapter.weights, TorchAdapter)
            group = RowGroup(torch.tensor(rows, device=device), torch.tensor(scales, device=device))
            self._groups.append((group, adapter.weights))
            every = torch.full((len(mixes),), torch.nan, device=device)
            every[group.rows] = group.scales
            self._scales.append(every)

    def delta(self, layer: int, stack: str, x: Tensor, rows: Tensor | None = None) -> Delta | None:
        groups = [(group, weights.layers[layer].get(stack, ())) for group, weights in self._groups]
        if rows is not None:
            groups = [(self._among(n, rows), pieces) for n, (_, pieces) in enumerate(groups)]
        return self._sum(layer, stack, x, [(group, pieces) for group, pieces in groups if pieces])

    def expert_delta(self, layer: int, stack: str, x: Tensor, rows: Tensor, experts: Tensor) -> Delta | None:
        groups: list[tuple[RowGroup, Sequence[Piece]]] = []
        for n, (_, weights) in enumerate(self._groups):
            for expert in experts.unique().tolist():
                if pieces := weights.layers[layer].get(f"{stack}.{expert}", ()):
                    groups.append((self._among(n, rows, experts == expert), pieces))
        return self._sum(layer, stack, x, groups)

    def _among(self, number: int, rows: Tensor, where: Tensor | None = None) -> RowGroup:
        """Those of some rows of the step that are in a group, by their places among them."""
        scales = self._scales[number][rows]
        own = ~scales.isnan() if where is None else where & ~scales.isnan()
        return RowGroup(own.nonzero().flatten(), scales[own])

    def _sum(self, layer: int, stack: str, x: Tensor, groups: Groups) -> Delta | None:
        groups = [(group, pieces) for group, pieces in groups if len(group.rows)]
        if not groups:
            return None
        if self._ordered:
            return OrderedLowRank(x, groups)
        reduce = self._reduce if stack in ("out", "down") else None
        outputs = self._groups[0][1].outputs[layer][stack.partition(".")[0]]
        return low_rank(x, outputs, groups, by_row=self._by_row, reduce=reduce)
