"""The CUDA runner: the same batches and values as the torch runner, in Triton kernels and captured graphs.

    Batch ──cuda_arrays──▶ one buffer of int32 (kernels/triton/layout) ──one copy──▶ device
          ──cuda_step────▶ residual rows: a graph for up to 512 rows, launched kernel by kernel above
          ──cuda_read────▶ head on asked rows, sampler (two graphs more), tokens back in one copy

Data, and who owns it: the model's weights and the pool's pages belong to the engine; the runner has the uploads (pinned
host buffers and their twins), the buffers of intermediates (one for graphs, which must not move, one that grows for
prompts), the graphs and the reader's logits. All of it is used by the worker thread alone, on one stream: what the
device writes is overwritten in the order of the stream, and an upload waits for its last copy before it is filled.

A step whose readouts look inside the model (hidden states, attention, logit lens) is launched kernel by kernel too, and
looked at on its way. In deterministic mode the same graphs hold other kernels, whose bits depend on the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import HeadwayError, PassFailed
from headway.base.samplers import Sampling
from headway.kernels.triton.attention import chunk_items
from headway.kv.pool import Pool
from headway.models.decoder import Decoder, Hooks
from headway.runtime.batch import Batch, Rows, reads_final_state
from headway.runtime.passes import Followed
from headway.runtime.profile import Profiler
from headway.runtime.readout import make_hooks
from headway.runtime.runners.base import SegmentResult, step_bytes
from headway.runtime.runners.cuda.arrays import Numbers, StepInts, Upload, even
from headway.runtime.runners.cuda.graphs import SIZES, Graphs, padded
from headway.runtime.runners.cuda.model import Buffers, CudaModel, Step
from headway.runtime.runners.cuda.readout import CudaReader, Values

GRAPH_INTS = 1 << 20  # numbers that a captured step has room for
FEW = 4  # rows of a sequence that attention takes one by one


class CudaRunner:
    """Runs batches on a CUDA device. With `graphs=False` every kernel is launched by hand."""

    def __init__(
        self,
        decoder: Decoder,
        pool: Pool,
        page_size: int,
        *,
        profiler: Profiler,
        graphs: bool = True,
        deterministic: bool = False,
    ) -> None:
        self.decoder, self.pool, self.page_size, self.profiler = decoder, pool, page_size, profiler
        self.model = CudaModel(decoder, pool, deterministic=deterministic)
        self._graphs = Graphs(graphs and decoder.device.type == "cuda")
        self._reader = CudaReader(self.model, self._graphs)
        self._layout = StepInts(self.model.windows, page_size)
        self._fixed = Upload(GRAPH_INTS, torch.int32, decoder.device)
        self._fixed_room: Buffers | None = None
        self._free = Upload(1 << 14, torch.int32, decoder.device)
        self._free_room: Buffers | None = None

    def execute(self, batch: Batch) -> list[SegmentResult]:
        """Apply the edits, run the model over the rows, read what was asked."""
        return self.begin(batch)()

    def begin(self, batch: Batch) -> Callable[[], list[SegmentResult]]:
        """Set the device to work; what comes back waits for it. The host is free meanwhile."""
        with torch.inference_mode(), self._where():
            finish = self._begin(batch)

        def finished() -> list[SegmentResult]:
            with torch.inference_mode(), self._where():
                return finish()

        return finished

    @property
    def measures(self) -> bool:
        """Whether steps are being measured."""
        return self.profiler.enabled

    @property
    def most_rows(self) -> int:
        """How many rows go on by themselves in one step, at most."""
        return SIZES[-1]

    def draws(self, how: Sampling) -> bool:
        """Whether rows that go on by themselves can draw so."""
        return self._reader.draws(how)

    def begin_rows(self, rows: Rows) -> CudaRows:
        """Set the device to work on rows that go on by themselves, behind those that it may be at work on."""
        with torch.inference_mode(), self._where():
            size = padded(len(rows))
            assert size is not None
            self._fixed.wait()
            padding = even(size)
            used = self._layout.fill_rows(self._fixed.host, rows, padding)
            if used is None:
                raise PassFailed(f"the pages of {len(rows)} rows are more than a captured step has room for")
            self._fixed.send(used)
            return CudaRows(self._reader, rows, self._reader.row_logits(self._replayed(padding, size)), self._where)

    def _where(self) -> AbstractContextManager[object]:
        """Triton launches on the thread's own device, whatever device the tensors are on."""
        device = self.decoder.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _begin(self, batch: Batch) -> Callable[[], list[SegmentResult]]:
        if batch.edits:
            self.pool.apply(batch.edits)
        inside = any(not reads_final_state(r.what) for s in batch.segments for _, _, r in s.readouts)
        hooks = make_hooks(batch, self.model, self.page_size) if inside else None
        self.profiler.begin(len(batch.write_rows))
        x = self._forward(batch, hooks) if len(batch.tokens) else None
        kept = None if x is None else _kept(batch, x)
        read = self._reader.begin(batch, x, self.profiler.mark, hooks)
        return lambda: self._finish(batch, read(), kept)

    def _finish(self, batch: Batch, values: Values, kept: list[Tensor | None] | None) -> list[SegmentResult]:
        if self.profiler.measuring:
            self.profiler.end(step_bytes(self.decoder, batch, self.page_size))
        return [
            SegmentResult({index: values[i, index] for index, _, _ in segment.readouts}, kept[i] if kept else None)
            for i, segment in enumerate(batch.segments)
        ]

    @property
    def captured(self) -> list[torch.cuda.CUDAGraph]:
        """The graphs so far, in the order in which they were first needed: a step's own, its head, its samplers."""
        return [graph for graph in self._graphs.graphs.values() if graph is not None]

    def _forward(self, batch: Batch, hooks: Hooks | None = None) -> Tensor:
        numbers, count = self._layout.read(batch), len(batch.tokens)
        size = padded(count)
        rows = even(count if size is None else size)
        large = size is None or self._layout.size(numbers, rows) > GRAPH_INTS
        if large or hooks is not None or self.profiler.measuring:
            return self._by_hand(batch, numbers, rows, hooks)
        assert size is not None
        self._fixed.wait()
        self._fixed.send(self._layout.fill(self._fixed.host, batch, numbers, rows))
        return self._replayed(rows, size)

    def _replayed(self, rows: int, size: int) -> Tensor:
        """Residual rows of the step whose numbers are on their way, laid out for so many rows."""
        room, step = self._graph_room(), Step(self._fixed.device, rows, size)
        self._graphs.run(("step", size), lambda: self.model.run(step, room, _unmarked))
        return room.x[:size]

    def _by_hand(self, batch: Batch, numbers: Numbers, rows: int, hooks: Hooks | None) -> Tensor:
        """Rows of any number: long segments on the matrix units, the others one by one."""
        count = len(batch.tokens)
        items = chunk_items(
            [(s.rows.start, len(s.rows)) for s in batch.segments if len(s.rows) > FEW], self.model.chunk
        )
        singles = [row for s in batch.segments if len(s.rows) <= FEW for row in s.rows]
        used = even(self._layout.size(numbers, rows))
        behind = used + even(len(items))
        needed = behind + len(singles)
        if needed > len(self._free):
            self._free.grow(2 * needed)
        self._free.wait()
        host, device = self._free.host, self._free.device
        self._layout.fill(host, batch, numbers, rows)
        host[used : used + len(items)] = items
        host[behind:needed] = singles
        self._free.send(needed)
        step = Step(
            device,
            rows,
            count,
            singles=device[behind:needed],
            items=device[used : used + len(items)].view(-1, 2) if items else None,
            hooks=hooks,
        )
        if self._free_room is None or self._free_room.rows < count:
            self._free_room = None  # the old one goes before the new one comes
            self._free_room = Buffers(self.decoder, count)
        return self.model.forward(step, self._free_room, self.profiler.mark)

    def _graph_room(self) -> Buffers:
        if self._fixed_room is None:
            self._fixed_room = Buffers(self.decoder, SIZES[-1])
        return self._fixed_room


class CudaRows:
    """A step of rows that go on by themselves, whose logits [N, V] are on their way."""

    def __init__(
        self, reader: CudaReader, rows: Rows, logits: Tensor, where: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._reader, self._rows, self._logits, self._where = reader, rows, logits, where
        self._wait: Callable[[], list[int]] | None = None
        self._failed: dict[int, HeadwayError] = {}

    def draw(self, masks: Sequence[Followed | None]) -> None:
        """Have the device draw, among what the masks allow."""
        words: list[np.ndarray | None] = []
        for i, mask in enumerate(masks):
            try:
                words.append(None if mask is None else mask.words())
            except HeadwayError as error:  # there is no mask for this row; the others go on
                self._failed[i] = error
                words.append(None)
        with torch.inference_mode(), self._where():
            self._wait = self._reader.draw_rows(self._rows, self._logits, words)

    def tokens(self) -> list[int | HeadwayError]:
        """What was drawn, once it is there."""
        assert self._wait is not None
        found: list[int | HeadwayError] = [*self._wait()]
        for i, error in self._failed.items():
            found[i] = error
        return found


def _unmarked(name: str) -> None:
    """No time is taken of what may be captured: waiting for the device would end the capture."""


def _kept(batch: Batch, x: Tensor) -> list[Tensor | None]:
    """Each segment's last row, where it is wanted: copies, as the next step writes where x is."""
    if len(x) > SIZES[-1]:  # few segments, and their rows must not keep all of x alive
        return [x[s.rows[-1]].clone() if s.keep_last else None for s in batch.segments]
    rows = x[: len(batch.tokens)].clone().unbind()
    return [rows[s.rows[-1]] if s.keep_last else None for s in batch.segments]
