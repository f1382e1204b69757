"""Stored bytes to a device, through two buffers of host memory: no weight is whole anywhere but where it stays.

    the file's map ──copy──▶ buffer 1 or 2 ──side stream──▶ its place in the weight

The buffers are pinned where the device is a CUDA one, so that one of them travels while the other is filled. A weight
stored in the type it is loaded as goes straight to its place; any other crosses in its stored form and becomes numbers
there, a few MiB at a time. With a CPU as the device the same chunks take the same ways, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from headway.base.errors import Unsupported
from headway.models.files.dequant import FLOATS, decode, may_overflow, store
from headway.models.files.gguf import KINDS, Kind
from headway.models.files.mapped import Span

SIZE = 64 << 20  # bytes of one buffer
VALUES = 1 << 22  # numbers that are converted at once on the device


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `start` to `stop` of a stored tensor, which hold its numbers `first` to `last`."""

    start: int
    stop: int
    first: int
    last: int


def chunks(count: int, packing: Kind, unit: int, room: int) -> Iterator[Chunk]:
    """A stored tensor of `count` numbers in pieces of at most `room` bytes, or one unit where that is more.

    A unit is so many numbers that stay together: whole blocks.
    """
    assert unit % packing.block == 0, (unit, packing)
    size = unit // packing.block * packing.nbytes
    step = max(1, room // size) * unit
    for first in range(0, count, step):
        last = min(first + step, count)
        start, stop = (n // packing.block * packing.nbytes for n in (first, last))
        yield Chunk(start, stop, first, last)


class Staging:
    """Two buffers and the stream that empties them. Use it in a `with`: what was sent is there when that ends."""

    def __init__(self, device: torch.device, size: int = SIZE) -> None:
        self.device, self.size = device, size
        cuda = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if cuda else None
        self._slots = [_Slot(cuda), _Slot(cuda)]
        self._turn = 0

    def send(self, span: Span, kind: str, target: Tensor, what: str, *, pairs: int = 0) -> None:
        """Fill `target`, contiguous on the device, from a stored tensor of its shape; soon.

        `pairs` is the head size of rows stored for rotation of neighbouring pairs; they come to stand for rotation of
        halves. A number too large for the target raises `Unsupported`, now or at a later call, and says `what` has it.
        """
        packing = KINDS.get(kind) or Kind(1, FLOATS[kind].itemsize)
        form = _Form(kind, packing, pairs * target[0].numel() if pairs else packing.block, pairs, what)
        flat = target.view(-1)
        self._wait_for_current()
        for chunk in chunks(flat.numel(), packing, form.unit, self.size):
            slot = self._next(chunk.stop - chunk.start)
            part = slot.buffer[: chunk.stop - chunk.start]
            part.copy_(torch.from_numpy(span.bytes(chunk.start, chunk.stop)))
            span.forget(chunk.start, chunk.stop)
            with self._beside():
                slot.leave(part, form, flat[chunk.first : chunk.last])

    def settle(self) -> None:
        """Have the device's current work wait for what was sent; the host does not."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def finish(self) -> None:
        """Wait until everything that was sent is there."""
        for slot in self._slots:
            slot.wait()
        self.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif self._side is not None:
            self._side.synchronize()  # nothing is on its way to memory that is given back
        self._slots = []

    def _next(self, nbytes: int) -> _Slot:
        """The buffer whose turn it is, empty."""
        self._turn = 1 - self._turn
        slot = self._slots[self._turn]
        slot.wait()
        with self._beside():  # memory is pinned for the device that is current
            slot.make_room(nbytes)
        return slot

    def _wait_for_current(self) -> None:
        """What is sent may go where memory was used until just now."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a tensor is stored: its type, and how many of its numbers stay together."""

    kind: str
    packing: Kind
    unit: int
    pairs: int  # head size of rows that are to be put in another order, or 0
    what: str

    def place(self, part: Tensor, out: Tensor) -> Tensor | None:
        """Stored bytes into their numbers' place `out`, flat. Where some may not fit: a flag, whether one did not."""
        if FLOATS.get(self.kind) == out.dtype and not self.pairs:
            out.view(torch.uint8).copy_(part, non_blocking=True)
            return None
        there, flag = part.to(out.device, non_blocking=True), None
        room = VALUES // self.packing.block * self.packing.nbytes
        for c in chunks(len(out), self.packing, self.unit, room):
            values, target = self.ordered(decode(self.kind, there[c.start : c.stop]), out[c.first : c.last])
            target.copy_(values)
            if may_overflow(values.dtype, out.dtype):
                lost = (torch.isinf(target) & torch.isfinite(values)).any()
                flag = lost if flag is None else flag | lost
        return flag

    def ordered(self, values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers and their places, seen so that each is copied to its own."""
        if not self.pairs:
            return values, target
        half, width = self.pairs // 2, self.unit // self.pairs
        return values.view(-1, half, 2, width).transpose(1, 2), target.view(-1, 2, half, width)

    def refuse(self, part: Tensor, dtype: torch.dtype) -> None:
        """Raise for the number in these bytes that does not fit."""
        values = decode(self.kind, part)
        try:
            store(torch.empty(values.shape, dtype=dtype), values)
        except Unsupported as error:
            raise Unsupported(f"{self.what}, stored as {self.kind}: {error}") from None


class _Slot:
    """One buffer, what is in it, and whether that has left."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._sent: tuple[Tensor, _Form, torch.dtype] | None = None
        self._flag: Tensor | None = None  # on the device: whether a number did not fit
        self._left = torch.cuda.Event() if pinned else None

    def make_room(self, nbytes: int) -> None:
        if len(self.buffer) < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def leave(self, part: Tensor, form: _Form, out: Tensor) -> None:
        """Go to `out` in the order of the current stream."""
        self._sent = part, form, out.dtype
        self._flag = form.place(part, out)
        if self._left is not None:
            self._left.record()

    def wait(self) -> None:
        """Until it has left."""
        if self._left is not None:
            self._left.synchronize()
        if self._flag is not None and self._sent is not None and bool(self._flag):
            part, form, dtype = self._sent
            form.refuse(part, dtype)
        self._sent = self._flag = None
