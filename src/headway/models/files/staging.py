"""Copying stored weights to a device through two host buffers: no weight is whole anywhere but at its destination.

    the file's map ──copy──▶ buffer 1 or 2 ──side stream──▶ the weight on the device

For a CUDA device the buffers are pinned host memory, so that one is copied while the other is filled. A weight stored
in the dtype it is loaded as is copied straight to its destination; any other is copied as stored and dequantized on the
device, a few MiB at a time. On a CPU the same chunks take the same path, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.models.files.dequant import FLOATS, decode, may_overflow, store
from headway.models.files.gguf import KINDS, BlockFormat
from headway.models.files.mapped import Span

SIZE = 64 << 20  # bytes of one buffer
VALUES = 1 << 22  # numbers converted at a time on the device


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """Bytes `start` to `stop` of a stored tensor, which hold its numbers `first` to `last`."""

    start: int
    stop: int
    first: int
    last: int


def chunks(count: int, block_format: BlockFormat, unit: int, limit: int) -> Iterator[StagedChunk]:
    """A stored tensor of `count` numbers in chunks of at most `limit` bytes, or one unit if that is more.

    A unit is the count of numbers that must stay together: whole blocks.
    """
    assert unit % block_format.block == 0, (unit, block_format)
    size = unit // block_format.block * block_format.nbytes
    step = max(1, limit // size) * unit
    for first in range(0, count, step):
        last = min(first + step, count)
        start, stop = (n // block_format.block * block_format.nbytes for n in (first, last))
        yield StagedChunk(start, stop, first, last)


class Staging:
    """Two buffers and the stream that empties them. Use it in a `with`: all copies are done when that ends."""

    def __init__(self, device: torch.device, size: int = SIZE) -> None:
        self.device, self.size = device, size
        cuda = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if cuda else None
        self._slots = [_Slot(cuda), _Slot(cuda)]
        self._current = 0

    def send(self, span: Span, kind: str, target: Tensor, what: str, *, pairs: int = 0) -> None:
        """Fill `target`, contiguous on the device, from a stored tensor of its shape, asynchronously.

        `pairs` is the head size of rows stored for rotation of neighboring pairs; they are reordered for rotation of
        halves. A number too large for the target raises `Unsupported`, now or at a later call, and names `what`.
        """
        block_format = KINDS.get(kind) or BlockFormat(1, FLOATS[kind].itemsize)
        form = _Form(kind, block_format, pairs * target[0].numel() if pairs else block_format.block, pairs, what)
        flat = target.view(-1)
        self._wait_for_current()
        for chunk in chunks(flat.numel(), block_format, form.unit, self.size):
            slot = self._next(chunk.stop - chunk.start)
            part = slot.buffer[: chunk.stop - chunk.start]
            part.copy_(torch.from_numpy(span.bytes(chunk.start, chunk.stop)))
            span.forget(chunk.start, chunk.stop)
            with self._on_side_stream():
                slot.copy(part, form, flat[chunk.first : chunk.last])

    def settle(self) -> None:
        """Make the device's current stream wait for the copies; the host does not wait."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def finish(self) -> None:
        """Wait until all copies are done."""
        for slot in self._slots:
            slot.wait()
        self.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif self._side is not None:
            self._side.synchronize()  # no copy may go to memory that is released
        self._slots = []

    def _next(self, nbytes: int) -> _Slot:
        """The next buffer, once it is empty."""
        self._current = 1 - self._current
        slot = self._slots[self._current]
        slot.wait()
        with self._on_side_stream():  # memory is pinned for the current device
            slot.reserve(nbytes)
        return slot

    def _wait_for_current(self) -> None:
        """The side stream waits for current work, which may still use the target's memory."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))

    def _on_side_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a tensor is stored: its type, and how many of its numbers must stay together."""

    kind: str
    block_format: BlockFormat
    unit: int
    pairs: int  # head size of rows to reorder, or 0
    what: str

    def place(self, part: Tensor, out: Tensor) -> Tensor | None:
        """Convert stored bytes into `out`, flat. Returns a flag on the device, whether a number overflowed, or None."""
        if FLOATS.get(self.kind) == out.dtype and not self.pairs:
            out.view(torch.uint8).copy_(part, non_blocking=True)
            return None
        there, flag = part.to(out.device, non_blocking=True), None
        limit = VALUES // self.block_format.block * self.block_format.nbytes
        for c in chunks(len(out), self.block_format, self.unit, limit):
            values, target = self.ordered(decode(self.kind, there[c.start : c.stop]), out[c.first : c.last])
            target.copy_(values)
            if may_overflow(values.dtype, out.dtype):
                lost = (torch.isinf(target) & torch.isfinite(values)).any()
                flag = lost if flag is None else flag | lost
        return flag

    def ordered(self, values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Values and target, viewed so that a copy reorders the rows."""
        if not self.pairs:
            return values, target
        half, width = self.pairs // 2, self.unit // self.pairs
        return values.view(-1, half, 2, width).transpose(1, 2), target.view(-1, 2, half, width)

    def refuse(self, part: Tensor, dtype: torch.dtype) -> None:
        """Raise for the number in these bytes that overflows."""
        values = decode(self.kind, part)
        try:
            store(torch.empty(values.shape, dtype=dtype), values)
        except Unsupported as error:
            raise Unsupported(f"{self.what}, stored as {self.kind}: {error}") from None


class _Slot:
    """One host buffer, pinned for CUDA, and the copy it is used for."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._sent: tuple[Tensor, _Form, torch.dtype] | None = None
        self._flag: Tensor | None = None  # on the device: whether a number overflowed
        self._copied = torch.cuda.Event() if pinned else None

    def reserve(self, nbytes: int) -> None:
        if len(self.buffer) < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def copy(self, part: Tensor, form: _Form, out: Tensor) -> None:
        """Copy to `out` on the current stream."""
        self._sent = part, form, out.dtype
        self._flag = form.place(part, out)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Until the copy is done."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._flag is not None and self._sent is not None and bool(self._flag):
            part, form, dtype = self._sent
            form.refuse(part, dtype)
        self._sent = self._flag = None
