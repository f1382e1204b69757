"""Adapters as the native step reads them: interleaved matrices, and the rows of a step by adapter.

Beside floats the matrices are float32. Beside quantized weights they are float16, times a power of two that uses its
range well: a step then reads half the bytes, and rounds less than the weights did.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from headway.base.arrays import aligned
from headway.base.specs.adapters import AdapterMix
from headway.kernels.native import library
from headway.kernels.native.library import AdapterLayerStruct, AdapterStruct, LowRankStruct, StepStruct
from headway.models.adapters.bound import BoundAdapter, StoredPairs, matrices_of
from headway.models.adapters.low_rank import LowRank
from headway.models.config import ModelConfig
from headway.runtime.runners.adapter_rows import AdapterRows, by_adapter

LANES = 16


class NativeAdapter:
    """An adapter's matrices, and the structs that point at them."""

    def __init__(self, adapter: BoundAdapter, config: ModelConfig, *, half: bool) -> None:
        self._config = config
        pairs = StoredPairs(_interleaved, half=half)
        self._experts: list[ctypes.Array[LowRankStruct]] = []
        layers = [self._layer(own, pairs) for own in adapter.places]
        self._arrays = pairs.all
        self.layers = (AdapterLayerStruct * len(layers))(*layers)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays) + sum(map(ctypes.sizeof, self._experts))

    def _layer(self, pairs: Mapping[str, LowRank], stored: StoredPairs[np.ndarray]) -> AdapterLayerStruct:
        struct, own = AdapterLayerStruct(), dict[str, ctypes.Array[LowRankStruct]]()
        for key, pair in pairs.items():
            role, _, expert = key.partition(".")
            if not expert:
                setattr(struct, role, _pair(pair, stored))
                continue
            if role not in own:
                own[role] = (LowRankStruct * matrices_of(self._config, role))()
            own[role][int(expert)] = _pair(pair, stored)
        for role, array in own.items():
            setattr(struct, role, array)
        self._experts += own.values()
        return struct


def _pair(pair: LowRank, stored: StoredPairs[np.ndarray]) -> LowRankStruct:
    a, b, factor = stored.of(pair)
    kind = library.KINDS.index("f16" if a.dtype == np.float16 else "f32")
    return LowRankStruct(pair.rank, kind, factor, a.ctypes.data, b.ctypes.data)


def _interleaved(matrix: np.ndarray, last: bool = False) -> np.ndarray:
    """A matrix [n, k] in blocks of 16 rows, the last padded with zeros: for each block and input 16 numbers."""
    n, k = matrix.shape
    padded = np.zeros((-(-n // LANES) * LANES, k), matrix.dtype)
    padded[:n] = matrix
    return aligned(padded.reshape(-1, LANES, k).swapaxes(1, 2))


class StepAdapters:
    """Fills a step's adapters. What it gives stays where it is until the next step; the batch keeps them alive."""

    def __init__(self) -> None:
        self._structs: ctypes.Array[AdapterStruct] | None = None
        self._rows = np.empty(0, np.int32)
        self._scales = np.empty(0, np.float32)

    def fill(self, step: StepStruct, mixes: Sequence[AdapterMix | None] | None) -> None:
        groups = () if mixes is None else by_adapter(mixes)
        step.adapter_count, step.adapter_uses = len(groups), sum(len(group.rows) for group in groups)
        if not groups:
            return
        firsts = accumulate((len(group.rows) for group in groups), initial=0)
        structs = [_struct(group, first) for group, first in zip(groups, firsts)]
        self._structs = step.adapters = (AdapterStruct * len(structs))(*structs)
        self._rows = np.array([row for group in groups for row in group.rows], np.int32)
        self._scales = np.array([scale for group in groups for scale in group.scales], np.float32)
        step.adapter_rows, step.adapter_scales = self._rows.ctypes.data, self._scales.ctypes.data


def _struct(group: AdapterRows, first: int) -> AdapterStruct:
    weights = group.adapter.weights
    assert isinstance(weights, NativeAdapter)
    return AdapterStruct(weights.layers, first, len(group.rows))
