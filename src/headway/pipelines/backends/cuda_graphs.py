"""Encoders on unpadded batches as CUDA graphs: one call launches a whole pass, whatever its rows are.

A pass of a small encoder is a hundred kernels of a few microseconds; launching them from Python takes longer than
computing them. A graph is captured for each size (tokens, rows and longest row, rounded up) the second time that size
occurs, and replayed from then on. One array is copied to the device: ids, positions, types and cu_seqlens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.pipelines.backends.torch import TorchBackend
from headway.pipelines.backends.unpadded import DeviceLayout, Reduce, UnpaddedEncoder
from headway.pipelines.inputs.arrays import TYPES, Ragged, flat_types
from headway.pipelines.task import ModelInputs, Row

MIN_TOKENS, MIN_ROWS, MIN_LONGEST = 128, 8, 128
MAX_GRAPHS = 128  # of one pipeline; further sizes are launched kernel by kernel
READS = ("first", "all")  # values of Task.reads that can be captured


@dataclass(frozen=True)
class GraphSize:
    """The capacity of a graph."""

    tokens: int
    rows: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> GraphSize:
        """The smallest size that fits rows of these lengths."""
        tokens, rows = round_up_quarters(sum(lengths), MIN_TOKENS), round_up_quarters(len(lengths), MIN_ROWS)
        return cls(tokens, rows, max(MIN_LONGEST, 1 << (max(lengths) - 1).bit_length()))

    @property
    def input_length(self) -> int:
        """The length of the input array: three numbers per token, and cu_seqlens."""
        return 3 * self.tokens + self.rows + 1

    def views(self, flat: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The model's inputs by name, [T] each, and cu_seqlens, [R + 1], as views of an input array."""
        ids, positions, types = flat[: 3 * self.tokens].view(3, self.tokens)
        return {"input_ids": ids, "position_ids": positions, "token_type_ids": types}, flat[3 * self.tokens :]


def round_up_quarters(count: int, least: int) -> int:
    """`count` rounded up to a power of two or a quarter of the way to the next, at least `least`."""
    if count <= least:
        return least
    step = max((1 << ((count - 1).bit_length() - 1)) // 4, 1)
    return -(-count // step) * step


class HostBuffers:
    """Pinned host buffers for the inputs and results of one batch; reused when the batch is finished.

    torch is called as rarely as possible: each call releases the GIL and waits to get it back.
    """

    def __init__(self, size: GraphSize, *, pinned: bool = True) -> None:
        self.size = size
        self.flat = torch.empty(size.input_length, dtype=torch.int32, pin_memory=pinned)
        self.array = self.flat.numpy()
        self.event = torch.cuda.Event() if pinned else None
        self.results: dict[str, tuple[Tensor, np.ndarray]] = {}


def stage(rows: Sequence[Row], buffers: HostBuffers, first_position: int) -> None:
    """Write rows into the input array; the padding after them holds valid ids whose outputs are ignored."""
    array, size = buffers.array, buffers.size
    lengths = [row.length for row in rows]
    total, capacity = sum(lengths), size.tokens
    ids, positions, types = array[: 3 * capacity].reshape(3, capacity)
    ids[:total] = np.fromiter(chain.from_iterable(row.inputs["input_ids"] for row in rows), np.int32, total)
    cu_seqlens = list(accumulate(lengths, initial=0))
    positions[:total] = np.arange(first_position, first_position + total) - np.repeat(cu_seqlens[:-1], lengths)
    types[:total] = flat_types(rows, total) if any(TYPES in row.inputs for row in rows) else 0
    for part in (ids, types):
        part[total:] = 0
    positions[total:] = first_position
    array[3 * capacity : 3 * capacity + len(cu_seqlens)] = cu_seqlens
    array[3 * capacity + len(cu_seqlens) :] = total


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A graph with its input and output tensors."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: Mapping[str, Tensor | Ragged]


class CudaGraphEncoder(UnpaddedEncoder):
    """An UnpaddedEncoder that captures and replays its passes; sizes that cannot be captured are launched normally."""

    def __init__(self, backend: TorchBackend) -> None:
        super().__init__(backend)
        self._graphs: dict[Hashable, CapturedGraph | None] = {}  # None: seen once
        self._free: dict[GraphSize, list[HostBuffers]] = {}
        self._stream = torch.cuda.Stream(backend.device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self.captures = self.replays = 0

    def batch(self, rows: Sequence[Row]) -> ModelInputs:
        size = GraphSize.of([row.length for row in rows])
        free = self._free.setdefault(size, [])
        buffers = free.pop() if free else HostBuffers(size)
        stage(rows, buffers, self.first_position)
        return ModelInputs({"flat": buffers.flat}, tuple(rows), True, buffers)

    def compute(self, batch: ModelInputs, reads: str, reduce: Reduce, key: Hashable) -> Mapping[str, Tensor | Ragged]:
        buffers: HostBuffers = batch.buffers
        size, flat = buffers.size, buffers.flat
        name = (key, reads, size)
        captured = self._graphs.get(name)
        if captured is None:
            capture = key is not None and reads in READS and name in self._graphs and self.captures < MAX_GRAPHS
            captured = self._captured(name, flat, size, reads, reduce) if capture else None
        if captured is None:
            self._graphs.setdefault(name, None)
            inputs = flat.to(self._backend.device, non_blocking=True)
            return self._launch(inputs, batch, reads, reduce)
        captured.inputs.copy_(flat, non_blocking=True)
        captured.graph.replay()
        self.replays += 1
        if all(isinstance(value, Tensor) and value.ndim == 1 for value in captured.output.values()):
            return ReplayedResults(captured.output, len(batch.rows), buffers, self._free[size])
        return _cut(captured.output, batch.rows)

    def _launch(self, flat: Tensor, batch: ModelInputs, reads: str, reduce: Reduce) -> Mapping[str, Tensor | Ragged]:
        """The pass launched kernel by kernel, without padding."""
        size: GraphSize = batch.buffers.size
        inputs, cu_seqlens = size.views(flat)
        total, count = sum(row.length for row in batch.rows), len(batch.rows)
        layout = DeviceLayout(cu_seqlens[: count + 1], size.longest)
        unpadded = ModelInputs({name: value[:total] for name, value in inputs.items()}, batch.rows, True)
        return reduce(self.read(unpadded.inputs, layout, self.read_indices(unpadded, reads), reads), unpadded)

    def _captured(
        self, name: Hashable, flat: Tensor, size: GraphSize, reads: str, reduce: Reduce
    ) -> CapturedGraph | None:
        static = torch.empty(size.input_length, dtype=torch.int32, device=self._backend.device)

        def work() -> Mapping[str, Tensor | Ragged]:
            inputs, cu_seqlens = size.views(static)
            layout = DeviceLayout(cu_seqlens, size.longest)
            at = cu_seqlens[:-1].clamp(max=size.tokens - 1).long() if reads == "first" else None
            return reduce(self.read(inputs, layout, at, reads), ModelInputs(inputs, (), True, size, cu_seqlens))

        try:
            graph, output = self._capture(work, static, flat)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a model that synchronizes with the device cannot be captured
            warnings.warn(f"passes of this model cannot be captured as CUDA graphs: {str(error)[:200]}", stacklevel=2)
            self.captures = MAX_GRAPHS
            return None
        self.captures += 1
        self._graphs[name] = captured = CapturedGraph(graph, static, output)
        return captured

    def _capture(self, work: Callable[[], Any], static: Tensor, flat: Tensor) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        static.copy_(flat)
        self._stream.wait_stream(torch.cuda.current_stream(self._backend.device))
        with torch.cuda.stream(self._stream):
            work()  # warm up: libraries initialize what they may not during a capture
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._backend.device).wait_stream(self._stream)
        return graph, output


class ReplayedResults(Mapping[str, Tensor]):
    """Scalar results per row: on the device by name, and being copied into reused host buffers."""

    def __init__(self, output: Mapping[str, Any], rows: int, buffers: HostBuffers, free: list[HostBuffers]) -> None:
        self._output, self._rows, self._buffers, self._free = output, rows, buffers, free
        for name, value in output.items():
            if name not in buffers.results:
                host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                buffers.results[name] = host, host.numpy()
            buffers.results[name][0].copy_(value, non_blocking=True)
        assert buffers.event is not None
        buffers.event.record(torch.cuda.current_stream(next(iter(output.values())).device))

    def wait(self) -> dict[str, np.ndarray]:
        """name → an array with one number per row, once they have arrived."""
        buffers = self._buffers
        assert buffers.event is not None
        buffers.event.synchronize()
        results = {name: buffers.results[name][1][: self._rows].copy() for name in self._output}
        self._free.append(buffers)
        return results

    def __getitem__(self, name: str) -> Tensor:
        return self._output[name][: self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._output)

    def __len__(self) -> int:
        return len(self._output)


def _cut(output: Mapping[str, Tensor | Ragged], rows: Sequence[Row]) -> dict[str, Tensor | Ragged]:
    """A graph's output without padding rows."""
    lengths = [row.length for row in rows]
    total = sum(lengths)
    return {
        name: Ragged(value.values[:total], lengths) if isinstance(value, Ragged) else value[: len(rows)]
        for name, value in output.items()
    }
