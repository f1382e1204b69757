"""Places beside a pool of torch: pinned memory where the pool is on a CUDA device.

    pool ──main stream──▶ staging ──copy stream──▶ pinned place        a page leaves: steps go on meanwhile
    pool ◀──main stream── incoming ◀──main stream── pinned place       a page comes back: the next step needs it

Staging has two halves in turn, and the main stream waits only for the copy out of the half that it fills. All of it is
taken when the engine starts, so that no page waits for memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.kv import host_memory
from headway.kv.tiers.page_store import averaged, pages_at_once

SLAB = 64 << 20  # bytes that are pinned at a time: a power of two, which is what torch takes


class CopyStream(Protocol):
    """The order between the steps' stream and a stream of copies."""

    def after_steps(self) -> AbstractContextManager[None]:
        """Copy after all that is queued for steps so far, concurrently with what comes next."""
        ...

    def mark(self) -> Any:
        """All copies so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Have what is queued for steps from now on wait for these copies."""
        ...

    def finish(self, mark: Any) -> None:
        """Wait for these copies, on the host."""
        ...


class InOrder:
    """On a CPU copies are done when they return."""

    def after_steps(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        pass

    def finish(self, mark: None) -> None:
        pass


class SideStream:
    """A stream of a CUDA device, beside the one of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    @contextmanager
    def after_steps(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: Any) -> None:
        mark.synchronize()


class TensorPlaces:
    """Places of one page each, [L, 2, page, Hkv, D]."""

    def __init__(self, places: int, page_shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype = tuple(page_shape), dtype
        self.page_bytes = math.prod(page_shape) * dtype.itemsize
        self._slabs, self._each = self._memory(places, pinned=device.type == "cuda")
        self._stream: CopyStream = SideStream(device) if device.type == "cuda" else InOrder()
        most = pages_at_once(self.page_bytes, places)
        staging = torch.empty((3, most, *page_shape), dtype=dtype, device=device)
        self._halves, self._incoming, self._turn = (staging[0], staging[1]), staging[2], 0
        self._left: list[Any] = [None, None]  # the copies out of each half
        self._saved: dict[int, Any] = {}  # the last copy into each place
        self.page_seconds: float | None = None
        self._measure(most, device)

    def _memory(self, places: int, *, pinned: bool) -> tuple[list[Tensor], int]:
        """Tensors of places, and how many places each has."""
        if not pinned:
            memory = host_memory.lazy_zeros(places * self.page_bytes)
            return [torch.frombuffer(memory, dtype=self._dtype).view(places, *self._shape)], places
        each = max(1, SLAB // self.page_bytes)
        numbers = math.prod(self._shape)
        slabs = []
        for first in range(0, places, each):
            count = min(each, places - first)
            flat = torch.empty(count * numbers, dtype=self._dtype, pin_memory=True)
            slabs.append(flat.view(count, *self._shape))
        return slabs, each

    def _measure(self, most: int, device: torch.device) -> None:
        """Time copies to a device: later ones overlap with steps, so that the host cannot tell."""
        if device.type != "cuda":
            return
        count = min(most, len(self._slabs[0]))
        for _ in range(2):  # the first one warms up
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            self.read(range(count))
            torch.cuda.synchronize(device)
            self.page_seconds = (time.perf_counter() - began) / count

    def write(self, places: Sequence[int], data: Tensor) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        half, count = self._halves[turn], len(places)
        if self._left[turn] is not None:
            self._stream.wait(self._left[turn])
        half[:count].copy_(data.movedim(2, 0))
        with self._stream.after_steps():
            for i, place in enumerate(places):
                self._row(place).copy_(half[i], non_blocking=True)
        self._left[turn] = mark = self._stream.mark()
        self._saved.update(dict.fromkeys(places, mark))

    def read(self, places: Sequence[int]) -> Tensor:
        began, count = time.perf_counter(), len(places)
        for mark in {self._saved[place] for place in places if place in self._saved}:
            self._stream.wait(mark)
        for i, place in enumerate(places):
            self._incoming[i].copy_(self._row(place), non_blocking=True)
        if not self._incoming.is_cuda:
            self.page_seconds = averaged(self.page_seconds, (time.perf_counter() - began) / count)
        return self._incoming[:count].movedim(0, 2)

    def to_bytes(self, place: int) -> bytes:
        if place in self._saved:
            self._stream.finish(self._saved[place])
        return self._row(place).reshape(-1).view(torch.uint8).numpy().tobytes()

    def from_bytes(self, pages: Sequence[bytes]) -> Tensor:
        data = torch.frombuffer(bytearray(b"".join(pages)), dtype=self._dtype)
        return data.view(len(pages), *self._shape).movedim(0, 2)

    def _row(self, place: int) -> Tensor:
        return self._slabs[place // self._each][place % self._each]
