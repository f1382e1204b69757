"""Adapters on a CUDA device: their matrices and the table that kernels find them by, and the tiles of a step's rows.

A loaded adapter has a slot of the table until its last reference is gone. A step's tiles go to the device in one copy,
laid out by the step's `AdapterShape` alone, so that a captured graph serves every step of that shape. After the layers
the table has as many rows as matrices outside of them take.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.base.specs.adapters import OUTSIDE, AdapterMix, Mixes
from headway.kernels.native.library import EXPERT_ROLES, HEAD_ROLES
from headway.kernels.reference.lora import Piece
from headway.kernels.reference.quantized import tensor
from headway.kernels.triton.adapters.lora import (
    EXPERT_MATRICES,
    MATRICES,
    PIECES,
    RANKS,
    SPLITS,
    TILE,
    AdapterTable,
    AdapterTiles,
    padded_ranks,
)
from headway.models.adapters.bound import BoundAdapter, StoredPairs, layer_targets, matrices_of, target_shapes
from headway.models.config import ModelConfig
from headway.runtime.adapters import LoadedAdapter
from headway.runtime.runners.adapter_rows import by_adapter
from headway.runtime.runners.cuda.arrays import Upload, even
from headway.runtime.runners.cuda.graphs import padded
from headway.runtime.runners.row_adapters import ALL_STACKS, OUTER_STACKS, STACKS, head_on

SLOTS = 1024  # adapters that may be loaded at once
EACH = (*EXPERT_ROLES, *HEAD_ROLES)  # matrices of each expert and head, in the table's order


class CudaAdapter:
    """An adapter's matrices on the device, and its slot in the table."""

    def __init__(self, tensors: list[Tensor], slot: int, adapter: BoundAdapter, head: Piece | None = None) -> None:
        self._tensors, self.slot, self.head = tensors, slot, head
        found = [(key.partition(".")[0], pair.rank) for pairs in adapter.places for key, pair in pairs.items()]
        used = {role for role, _ in found}
        self.stacks = frozenset(stack for stack, roles in ALL_STACKS.items() if used & {*roles})
        self.rank, self.expert_rank = (
            max((rank for role, rank in found if (role in EACH) is own), default=0) for own in (False, True)
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)


@dataclass(frozen=True)
class AdapterShape:
    """All that the launches of a step's adapters depend on."""

    rounds: int  # the most adapters of a row: each round adds one
    tiles: int  # of a round
    uses: int  # of a round
    blocks: int  # of RANKS
    expert_blocks: int  # of RANKS, of experts
    stacks: frozenset[str]  # matmuls that an adapter adds to

    @property
    def size(self) -> int:
        """Numbers on the device."""
        return self._rows_at + 3 * self.rounds * self.uses

    @property
    def _rows_at(self) -> int:
        return even(3 * self.rounds * self.tiles)

    def views(self, ints: Tensor) -> list[AdapterTiles]:
        """The tiles of each round, in a buffer of the device."""
        tiles = ints[: 3 * self.rounds * self.tiles].view(self.rounds, self.tiles, 3)
        half = 2 * self.rounds * self.uses
        both = ints[self._rows_at : self._rows_at + half].view(2, self.rounds, self.uses)
        places = ints[self._rows_at + half : self.size].view(self.rounds, self.uses)
        scales = both[1].view(torch.float32)
        return [AdapterTiles(tiles[i], both[0, i], scales[i], places[i], self.blocks) for i in range(self.rounds)]

    def fill(self, rounds: Sequence[_Round]) -> np.ndarray:
        """The numbers for a buffer of the device."""
        host = np.zeros(self.size, np.int32)
        tiles = host[: 3 * self.rounds * self.tiles].reshape(self.rounds, self.tiles, 3)
        half = 2 * self.rounds * self.uses
        both = host[self._rows_at : self._rows_at + half].reshape(2, self.rounds, self.uses)
        places = host[self._rows_at + half :].reshape(self.rounds, self.uses)
        places[:] = -1
        for i, one in enumerate(rounds):
            tiles[i, : len(one.tiles)] = one.tiles
            places[i, one.rows] = np.arange(len(one.rows))
            both[0, i, : len(one.rows)] = one.rows
            both[1, i, : len(one.rows)] = np.array(one.scales, np.float32).view(np.int32)
        return host


@dataclass(frozen=True, eq=False)
class StepTiles:
    """The adapters of one step, on the device."""

    shape: AdapterShape
    rounds: list[AdapterTiles]
    sums: Tensor  # between the two kernels


@dataclass(frozen=True, eq=False)
class _LastStep:
    """The tiles of the last step with adapters, and what they are for. It keeps no adapter alive."""

    mixes: list[weakref.ref[AdapterMix] | None]
    size: int | None
    tiles: StepTiles

    def serves(self, mixes: Mixes, size: int | None) -> bool:
        """Whether these rows are under the same mixes."""
        if size != self.size or len(mixes) != len(self.mixes):
            return False
        pairs = zip(mixes, self.mixes, strict=True)
        return all(known is None if mix is None else known is not None and known() is mix for mix, known in pairs)


class _Round:
    """At most one use of every row."""

    def __init__(self) -> None:
        self.tiles: list[tuple[int, int, int]] = []
        self.rows: list[int] = []
        self.scales: list[float] = []

    def add(self, slot: int, uses: list[tuple[int, float]]) -> None:
        for start in range(0, len(uses), TILE):
            part = uses[start : start + TILE]
            self.tiles.append((slot, len(self.rows), len(part)))
            self.rows += [row for row, _ in part]
            self.scales += [scale for _, scale in part]


class CudaAdapters:
    """The adapters of a CUDA runner. Used by the worker thread, but slots come back from any."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, half: bool) -> None:
        self._config, self._device, self._half = config, device, half
        self._dtype = torch.float16 if half else dtype
        self._table: AdapterTable | None = None
        self._free = deque(range(SLOTS))  # a finalizer only appends here
        self._upload = Upload(1 << 12, torch.int32, device)
        self._graph_upload: dict[AdapterShape, Upload] = {}
        self._last: _LastStep | None = None
        self._sums: list[Tensor] = []  # they stay, since graphs go on using them
        there = target_shapes(config)
        self._roles = [role for roles in STACKS.values() for role in roles if role in there]  # in the table's order
        assert len(self._roles) <= MATRICES
        outer = [role for roles in OUTER_STACKS.values() for role in roles if role in there]
        self._outer = [key for role in outer for key in _keys(role, matrices_of(config, role))]
        self._rows = config.layers + -(-len(self._outer) // MATRICES)
        self._layers = [layer_targets(config, layer) for layer in (*range(config.layers), OUTSIDE)]

    def row(self, layer: int) -> int:
        """Where a layer, or what is outside of them, is in the table."""
        return self._config.layers if layer == OUTSIDE else layer

    def pieces(self, layer: int, stack: str) -> tuple[int, tuple[int, ...]]:
        """Of a layer's stacked matrix the first piece in the table, and the outputs of each."""
        shapes = self._layers[layer]
        if layer == OUTSIDE:
            keys = _keys(stack, matrices_of(self._config, stack))
            return self._outer.index(keys[0]), (shapes[stack][0],) * len(keys)
        roles = [role for role in STACKS[stack] if role in shapes]
        return self._roles.index(roles[0]), tuple(shapes[role][0] for role in roles)

    @property
    def table(self) -> AdapterTable:
        if self._table is None:
            self._table = AdapterTable.empty(SLOTS, self._rows, self._dtype, self._device)
        return self._table

    def load(self, adapter: BoundAdapter) -> CudaAdapter:
        """Upload an adapter and give it a slot."""
        if not self._free:
            raise Unsupported(f"{SLOTS} adapters are loaded, which is the most at once; unload some")
        slot = self._free.popleft()
        try:
            tensors = self._fill(adapter, slot)
        except BaseException:
            self._free.append(slot)
            raise
        loaded = CudaAdapter(tensors, slot, adapter, head_on(adapter, self._device))
        weakref.finalize(loaded, self._free.append, slot)
        return loaded

    def _fill(self, adapter: BoundAdapter, slot: int) -> list[Tensor]:
        pointers = torch.zeros(self._rows * MATRICES, 2, dtype=torch.int64)
        ranks = torch.zeros(self._rows * MATRICES, dtype=torch.int32)
        factors = torch.ones(self._rows * MATRICES)
        experts = torch.zeros(self._rows, EXPERT_MATRICES, dtype=torch.int64)
        listings: list[Tensor] = []
        stored = StoredPairs(self._on_device, half=self._half)
        for l, pairs in enumerate(adapter.places):
            by_expert: dict[str, Tensor] = {}
            for key, pair in pairs.items():
                (role, _, expert), (a, b, factor) = key.partition("."), stored.of(pair)
                own = torch.tensor([a.data_ptr(), b.data_ptr()])
                if role not in EACH:
                    at = l * MATRICES + (self._roles if l < len(adapter.layers) else self._outer).index(key)
                    pointers[at], ranks[at], factors[at] = own, pair.rank, factor
                    continue
                count = matrices_of(self._config, role)
                listed = by_expert.setdefault(role, torch.zeros(count, 4, dtype=torch.int64))
                bits = torch.tensor(factor, dtype=torch.float32).view(torch.int32)
                listed[int(expert)] = torch.cat([own, torch.stack([torch.tensor(pair.rank), bits]).long()])
            for role, listed in by_expert.items():
                listings.append(listed.to(self._device))
                experts[l, EACH.index(role)] = listings[-1].data_ptr()
        table = self.table
        for whole, filled in zip(table.tensors, (pointers, ranks, factors, experts), strict=True):
            whole[slot] = filled.to(self._device).view(whole.shape[1:])
        return [*stored.all, *listings]

    def _on_device(self, matrix: np.ndarray, last: bool) -> Tensor:
        """A, or at last B, as kernels read it."""
        return padded_ranks(tensor(matrix), 1 if last else 0).to(self._device, self._dtype).contiguous()

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, mixes: Mixes | None, size: int | None) -> StepTiles | None:
        """The tiles of a step's rows, None if no row has an adapter.

        `size` is that of its graph, None for a step that is launched by hand. From step to step the same decode rows
        have the same mixes: then nothing is done, nor sent.
        """
        if mixes is None:
            return None
        if self._last is None or not self._last.serves(mixes, size):
            known = [None if mix is None else weakref.ref(mix) for mix in mixes]
            self._last = _LastStep(known, size, self._tiles(mixes, size))
        return self._last.tiles

    def _tiles(self, mixes: Mixes, size: int | None) -> StepTiles:
        rounds, rank, expert_rank, stacks = _rounds(mixes)
        most = max(len(one.tiles) for one in rounds)
        count = 1 << (len(rounds) - 1).bit_length()
        blocks, expert_blocks = (1 << (-(-r // RANKS) - 1).bit_length() for r in (rank, expert_rank))
        rows = even(len(mixes) if size is None else size)
        shape = AdapterShape(count, padded(most) or most, rows, blocks, expert_blocks, stacks)
        upload = self._buffer(shape, graph=size is not None)
        upload.put(shape.fill(rounds))
        return StepTiles(shape, shape.views(upload.device), self._scratch(shape))

    def _buffer(self, shape: AdapterShape, *, graph: bool) -> Upload:
        if graph:
            if shape not in self._graph_upload:
                self._graph_upload[shape] = Upload(shape.size, torch.int32, self._device)
            return self._graph_upload[shape]
        if len(self._upload) < shape.size:
            self._upload.grow(2 * shape.size)
        return self._upload

    def _scratch(self, shape: AdapterShape) -> Tensor:
        """Room for the sums of a round; each is twice as large as the one before."""
        needed = shape.uses * PIECES * SPLITS * shape.blocks * RANKS
        fitting = [sums for sums in self._sums if len(sums) >= needed]
        if not fitting:
            fitting = [torch.empty(1 << (needed - 1).bit_length(), dtype=torch.float32, device=self._device)]
            self._sums += fitting
        return fitting[0][:needed].view(shape.uses, PIECES, SPLITS, shape.blocks * RANKS)


def _keys(role: str, count: int) -> list[str]:
    """What pairs of a role outside of layers are called."""
    return [f"{role}.{i}" for i in range(count)] or [role]


def _rounds(mixes: Sequence[AdapterMix | None]) -> tuple[list[_Round], int, int, frozenset[str]]:
    """The uses of a step in rounds, the largest rank, that of experts, and the matmuls that any of them adds to."""
    rounds: list[_Round] = []
    seen = [0] * len(mixes)  # adapters of each row so far, which come in the order of their hashes
    rank, expert_rank, stacks = 1, 1, frozenset[str]()
    for adapter, rows, scales in by_adapter(mixes):
        weights = _weights(adapter)
        rank, stacks = max(rank, weights.rank), stacks | weights.stacks
        expert_rank = max(expert_rank, weights.expert_rank)
        parts: dict[int, list[tuple[int, float]]] = {}
        for row, scale in zip(rows, scales, strict=True):
            parts.setdefault(seen[row], []).append((row, scale))
            seen[row] += 1
        for number, uses in sorted(parts.items()):
            while len(rounds) <= number:
                rounds.append(_Round())
            rounds[number].add(weights.slot, uses)
    return rounds, rank, expert_rank, stacks


def _weights(adapter: LoadedAdapter) -> CudaAdapter:
    assert isinstance(adapter.weights, CudaAdapter)
    return adapter.weights
