"""Encoders over packed rows as captured CUDA graphs: one call launches a whole pass, whatever its rows are.

A pass of a small encoder is a hundred kernels of a few microseconds; launching them from Python takes longer than
computing them. A graph is captured for each size (tokens, rows and longest row, rounded up) the second time that the
size comes, and replayed ever after. What is copied to the device is one array: ids, positions, types, ends of rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.pipelines.backends.forward import Forward
from headway.pipelines.backends.unpadded import FixedLayout, PackedEncoder, Reduce
from headway.pipelines.inputs.arrays import TYPES, Ragged, flat_types
from headway.pipelines.task import Batch, Row

LEAST_TOKENS, LEAST_ROWS, LEAST_LONGEST = 128, 8, 128
MOST = 128  # graphs of one pipeline; sizes beyond are launched kernel by kernel
READS = ("first", "all")  # what a graph can be captured for


@dataclass(frozen=True)
class Size:
    """What a graph has room for."""

    tokens: int
    rows: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Size:
        """The smallest size with room for rows of these lengths."""
        tokens, rows = in_quarters(sum(lengths), LEAST_TOKENS), in_quarters(len(lengths), LEAST_ROWS)
        return cls(tokens, rows, max(LEAST_LONGEST, 1 << (max(lengths) - 1).bit_length()))

    @property
    def numbers(self) -> int:
        """How many numbers a batch of this size is: three a token, and the ends of rows from 0."""
        return 3 * self.tokens + self.rows + 1

    def views(self, flat: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs of the model by name, [T] each, and the ends of rows, [R + 1]."""
        ids, positions, types = flat[: 3 * self.tokens].view(3, self.tokens)
        return {"input_ids": ids, "position_ids": positions, "token_type_ids": types}, flat[3 * self.tokens :]


def in_quarters(count: int, least: int) -> int:
    """`count` rounded up to a power of two or a quarter of the way to the next, at least `least`."""
    if count <= least:
        return least
    step = max((1 << ((count - 1).bit_length() - 1)) // 4, 1)
    return -(-count // step) * step


class Room:
    """Memory of the host for one batch of a size: its numbers, and what comes back of it. Taken again when it is free.

    torch is called as seldom as can be: each call lets other threads take the interpreter, and waits to have it back.
    """

    def __init__(self, size: Size, *, pinned: bool = True) -> None:
        self.size = size
        self.flat = torch.empty(size.numbers, dtype=torch.int32, pin_memory=pinned)
        self.array = self.flat.numpy()
        self.event = torch.cuda.Event() if pinned else None
        self.back: dict[str, tuple[Tensor, np.ndarray]] = {}


def stage(rows: Sequence[Row], room: Room, first_position: int) -> None:
    """Rows as one array of `size.numbers`; places behind the rows hold valid ids that nobody reads."""
    array, size = room.array, room.size
    lengths = [row.length for row in rows]
    total, most = sum(lengths), size.tokens
    ids, positions, types = array[: 3 * most].reshape(3, most)
    ids[:total] = np.fromiter(chain.from_iterable(row.inputs["input_ids"] for row in rows), np.int32, total)
    ends = list(accumulate(lengths, initial=0))
    positions[:total] = np.arange(first_position, first_position + total) - np.repeat(ends[:-1], lengths)
    types[:total] = flat_types(rows, total) if any(TYPES in row.inputs for row in rows) else 0
    for part in (ids, types):
        part[total:] = 0
    positions[total:] = first_position
    array[3 * most : 3 * most + len(ends)] = ends
    array[3 * most + len(ends) :] = total


@dataclass(frozen=True, eq=False)
class Captured:
    """A graph, where its inputs lie and where its answer will."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    answer: Mapping[str, Tensor | Ragged]


class GraphedEncoder(PackedEncoder):
    """A PackedEncoder whose passes are captured and replayed; sizes that cannot be captured are launched as ever."""

    def __init__(self, run: Forward) -> None:
        super().__init__(run)
        self._found: dict[Hashable, Captured | None] = {}
        self._rooms: dict[Size, list[Room]] = {}
        self._stream = torch.cuda.Stream(run.device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self.captures = self.replays = 0

    def batch(self, rows: Sequence[Row]) -> Batch:
        size = Size.of([row.length for row in rows])
        free = self._rooms.setdefault(size, [])
        room = free.pop() if free else Room(size)
        stage(rows, room, self.first_position)
        return Batch({"flat": room.flat}, tuple(rows), True, room)

    def answered(self, batch: Batch, reads: str, reduce: Reduce, key: Hashable) -> Mapping[str, Tensor | Ragged]:
        room: Room = batch.room
        size, flat = room.size, room.flat
        name = (key, reads, size)
        captured = self._found.get(name)
        if captured is None:
            able = key is not None and reads in READS and name in self._found and self.captures < MOST
            captured = self._captured(name, flat, size, reads, reduce) if able else None
        if captured is None:
            self._found.setdefault(name, None)
            inputs = flat.to(self._run.device, non_blocking=True)
            return self._plainly(inputs, batch, reads, reduce)
        captured.inputs.copy_(flat, non_blocking=True)
        captured.graph.replay()
        self.replays += 1
        if all(isinstance(value, Tensor) and value.ndim == 1 for value in captured.answer.values()):
            return Replayed(captured.answer, len(batch.rows), room, self._rooms[size])
        return _cut(captured.answer, batch.rows)

    def _plainly(self, flat: Tensor, batch: Batch, reads: str, reduce: Reduce) -> Mapping[str, Tensor | Ragged]:
        """The pass launched kernel by kernel, on the rows alone."""
        size: Size = batch.room.size
        inputs, ends = size.views(flat)
        total, count = sum(row.length for row in batch.rows), len(batch.rows)
        layout = FixedLayout(ends[: count + 1], size.longest)
        some = {name: value[:total] for name, value in inputs.items()}
        known = Batch(some, batch.rows, True)
        return reduce(self.read(some, layout, self.places(known, reads), reads), known)

    def _captured(self, name: Hashable, flat: Tensor, size: Size, reads: str, reduce: Reduce) -> Captured | None:
        held = torch.empty(size.numbers, dtype=torch.int32, device=self._run.device)

        def work() -> Mapping[str, Tensor | Ragged]:
            inputs, ends = size.views(held)
            layout = FixedLayout(ends, size.longest)
            at = ends[:-1].clamp(max=size.tokens - 1).long() if reads == "first" else None
            return reduce(self.read(inputs, layout, at, reads), Batch(inputs, (), True, size, ends))

        try:
            found = self._capture(work, held, flat)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a model that waits for the device in its midst cannot be captured
            warnings.warn(f"passes of this model are not captured as graphs: {str(error)[:200]}", stacklevel=2)
            self.captures = MOST
            return None
        self.captures += 1
        self._found[name] = captured = Captured(found[0], held, found[1])
        return captured

    def _capture(self, work: Callable[[], Any], held: Tensor, flat: Tensor) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        held.copy_(flat)
        self._stream.wait_stream(torch.cuda.current_stream(self._run.device))
        with torch.cuda.stream(self._stream):
            work()  # once as it stands: libraries make ready what may not be made during a capture
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                answer = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._run.device).wait_stream(self._stream)
        return graph, answer


class Replayed(Mapping[str, Tensor]):
    """Single numbers of rows: on the device by name, and on their way to the host, into memory that is used again."""

    def __init__(self, answer: Mapping[str, Any], rows: int, room: Room, free: list[Room]) -> None:
        self._answer, self._rows, self._room, self._free = answer, rows, room, free
        for name, value in answer.items():
            if name not in room.back:
                host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                room.back[name] = host, host.numpy()
            room.back[name][0].copy_(value, non_blocking=True)
        assert room.event is not None
        room.event.record(torch.cuda.current_stream(next(iter(answer.values())).device))

    def wait(self) -> dict[str, np.ndarray]:
        """name → an array of the rows' numbers, once they have arrived."""
        room = self._room
        assert room.event is not None
        room.event.synchronize()
        found = {name: room.back[name][1][: self._rows].copy() for name in self._answer}
        self._free.append(room)
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._answer[name][: self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._answer)

    def __len__(self) -> int:
        return len(self._answer)


def _cut(answer: Mapping[str, Tensor | Ragged], rows: Sequence[Row]) -> dict[str, Tensor | Ragged]:
    """A graph's answer for its real rows."""
    lengths = [row.length for row in rows]
    total = sum(lengths)
    return {
        name: Ragged(value.values[:total], lengths) if isinstance(value, Ragged) else value[: len(rows)]
        for name, value in answer.items()
    }
