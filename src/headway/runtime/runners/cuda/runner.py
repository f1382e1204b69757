"""The CUDA runner: the same batches and values as the torch runner, in Triton kernels and captured graphs.

    Batch ──arrays───▶ one buffer of int32 (kernels/triton/layout) ──one copy──▶ device
          ──model────▶ residual rows, decode rows and chunks together: a graph up to 1,024 rows, launched above
          ──readout──▶ head on the rows that are read, sampler (two more graphs), tokens back in one copy

Data, and who owns it: the model's weights and the pool's pages belong to the engine; the runner has the uploads (pinned
host buffers and their copies on the device), the buffers of intermediates (one set for graphs, which must not move, one
that grows for prefills), the graphs and three readers: one for decode rows, whose tokens feed the next step without
the host, and two for segments, because the values of one step may be read while the next one is in flight. All of it is
used by the worker thread alone, on one stream: what the device writes is overwritten in the order of the stream, and an
upload waits for its last copy before it is filled again.

A step whose readouts look inside the model (hidden states, attention, logit lens) is launched kernel by kernel, with
hooks. In deterministic mode the same graphs hold other kernels, whose bits depend on the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import UNDECIDED, Sampling
from headway.kernels.triton import fused
from headway.kernels.triton.attention import chunk_items
from headway.kernels.triton.matmul import LEAST, MOST
from headway.kv.allocator import Edit
from headway.kv.tensor_pool import TensorPool
from headway.models.adapters.bound import BoundAdapter
from headway.models.decoder import Decoder
from headway.models.hooks import Hooks
from headway.runtime.batch import Batch, reads_final_state
from headway.runtime.passes import BEFORE, DecodeMask
from headway.runtime.profile import Profiler, step_bytes
from headway.runtime.readout import make_hooks
from headway.runtime.runners.base import SegmentResult, StepResult
from headway.runtime.runners.cuda.adapters import CudaAdapter
from headway.runtime.runners.cuda.arrays import StepInts, StepNumbers, Upload, even
from headway.runtime.runners.cuda.attention.prompts import CausalPrompt, find_prompts
from headway.runtime.runners.cuda.attention.shared_pages import SharedPages, SharedStep
from headway.runtime.runners.cuda.buffers import Buffers
from headway.runtime.runners.cuda.graphs import CHUNK_SIZES, SIZES, Graphs, padded
from headway.runtime.runners.cuda.model import PROGRAMS, CudaModel
from headway.runtime.runners.cuda.readout import CudaReader, RowValues, Values
from headway.runtime.runners.cuda.steps import DeviceStep

GRAPH_INTS = 1 << 20  # numbers that a captured step can hold
FEW = 4  # rows of a sequence that attention takes one by one
MUCH = 1 << 17  # rows × slots of long segments above which attention wants the matrix units
NEEDED_SIZES = tuple(size for size in SIZES if not LEAST <= size < MOST)
PART_INTS = 2 * CHUNK_SIZES[-1]  # room for the items of a captured step, or for its single rows
ITEM_INTS = 64  # a captured step has room for a multiple of 32 items


@dataclass(frozen=True, eq=False)
class StepParts:
    """The rows that attention takes one by one, and items of long segments (flat: first row, count) for the matrix
    units; and the rows that the last layer finishes (none: all of them)."""

    singles: list[int]
    items: list[int]
    needed: list[int]

    @classmethod
    def of(cls, batch: Batch, tokens: int, prompts: Sequence[CausalPrompt] = ()) -> StepParts:
        first, others = batch.decode_count, {prompt.row for prompt in prompts}
        long = [s for s in batch.segments if len(s.rows) > FEW and first + s.rows.start not in others]
        singles = [*range(first), *(first + row for s in batch.segments if len(s.rows) <= FEW for row in s.rows)]
        items = chunk_items([(first + s.rows.start, len(s.rows)) for s in long], tokens)
        return cls(singles, items, [] if batch.adapters is not None else _needed(batch))

    def padded(self) -> StepParts:
        """The same with room for more, so that few sizes serve all steps: rows -1 and items of no rows."""
        singles = self.singles + [-1] * ((1 << max(3, (len(self.singles) - 1).bit_length())) - len(self.singles))
        return StepParts(singles, self.items + [0] * (-len(self.items) % ITEM_INTS), self.needed)


class CudaRunner:
    """Runs batches on a CUDA device. With `graphs=False` every kernel is launched by hand."""

    def __init__(
        self,
        decoder: Decoder,
        pool: TensorPool,
        page_size: int,
        *,
        profiler: Profiler,
        graphs: bool = True,
        deterministic: bool = False,
    ) -> None:
        self.decoder, self.pool, self.page_size, self.profiler = decoder, pool, page_size, profiler
        self.model = self.new_model(decoder, pool, deterministic=deterministic)
        pool.clear_pages = fused.clear
        self._graphs = Graphs(graphs and decoder.device.type == "cuda")
        self._decode_reader = CudaReader(self.model, self._graphs, "decode")
        self.model.sampled = self._decode_reader.tokens  # what decode rows of the next step are fed with
        self._readers = [CudaReader(self.model, self._graphs, f"read {i}") for i in range(2)]
        self._last_read: tuple[CudaStep, CudaReader] | None = None  # the last step with segments, and its reader
        self._layout = StepInts(self.model.windows, page_size)
        self._fixed = Upload(GRAPH_INTS, torch.int32, decoder.device)
        self._fixed_parts = Upload(3 * PART_INTS, torch.int32, decoder.device)
        self._fixed_buffers: Buffers | None = None
        self._shared_pages: SharedPages | None = None
        if self.model.shared_room is not None:
            programs = max(1, PROGRAMS // 2 // decoder.config.kv_heads)  # one a multiprocessor: they are large
            how = {"tile": self.model.chunk, "programs": programs, "rows": SIZES[-1]}
            self._shared_pages = SharedPages(decoder.device, page_size, **how)
        self._free = Upload(1 << 14, torch.int32, decoder.device)
        self._free_buffers: Buffers | None = None

    overlaps = True

    def new_model(self, decoder: Decoder, pool: TensorPool, *, deterministic: bool) -> CudaModel:
        """What computes the forward pass."""
        return CudaModel(decoder, pool, deterministic=deterministic)

    @property
    def decode_limit(self) -> int:
        return 0 if self.profiler.enabled else SIZES[-1]

    def samples(self, how: Sampling) -> bool:
        return self._decode_reader.samples(how)

    def reads(self, what: Probe, how: Sampling) -> bool:
        return self._decode_reader.reads(what, how)

    def load_adapter(self, adapter: BoundAdapter) -> CudaAdapter:
        with torch.inference_mode(), self._where():
            return self.model.adapters.load(adapter)

    def edit(self, edits: Sequence[Edit]) -> None:
        with torch.inference_mode(), self._where():
            self.pool.apply(edits)

    def begin(self, batch: Batch) -> CudaStep:
        """Set the device to work on a step, after those that it may be at work on. The host is free meanwhile."""
        with torch.inference_mode(), self._where():
            inside = any(not reads_final_state(r.what) for s in batch.segments for _, _, r in s.readouts)
            hooks = make_hooks(batch, self.model, self.page_size) if inside else None
            self.profiler.begin(batch.computed)
            step = CudaStep(self, batch, is_measured=self.profiler.measuring)
            x, count = self.forward(batch, hooks) if batch.rows else None, batch.decode_count
            if x is not None and batch.decode is not None:
                step.logits = self._decode_reader.row_logits(x, batch.decode)
            if x is not None and batch.segments:
                step.kept = _kept(batch, x[count:])
            if batch.segments:
                mark = self.profiler.mark if step.is_measured else _unmarked
                step.read = self._free_reader(step).begin(batch, x, mark, hooks)
            return step

    def _free_reader(self, step: CudaStep) -> CudaReader:
        """The first reader, unless the step before reads with it and may still be in flight. Some steps never end."""
        reader, last = self._readers[0], self._last_read
        if last is not None and last[1] is reader and not last[0].is_over:
            reader = self._readers[1]
        self._last_read = step, reader
        return reader

    def _where(self) -> AbstractContextManager[object]:
        """Triton launches on the thread's own device, whatever device the tensors are on."""
        device = self.decoder.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @property
    def captured(self) -> list[torch.cuda.CUDAGraph]:
        """The graphs so far, in the order in which they were first needed: a step's own, its head, its samplers."""
        return [graph for graph in self._graphs.graphs.values() if graph is not None]

    def forward(self, batch: Batch, hooks: Hooks | None) -> Tensor:
        """Residual rows [T, E] of the whole step, decode rows first."""
        shared = None if self._shared_pages is None else self._shared_pages.find(batch.decode)
        numbers = self._layout.read(batch, None if shared is None else shared.starts)
        with_chunks = _attends_much(batch) and not self.model.deterministic
        size = padded(batch.rows, CHUNK_SIZES if with_chunks else SIZES)
        rows = even(batch.rows if size is None else size)
        large = size is None or self._layout.size(numbers, rows) > GRAPH_INTS
        if large or hooks is not None or self.profiler.measuring:
            return self._launch(batch, numbers, rows, hooks, shared)
        assert size is not None
        key: tuple[object, ...] = ("step", size)
        singles = items = needed = None
        if with_chunks:
            parts = StepParts.of(batch, self.model.chunk).padded()
            singles, items, needed = self._send_parts(parts)
            key = ("chunks", size, len(singles), len(items), len(parts.needed))
        self._fixed.wait()
        self._fixed.send(self._layout.fill(self._fixed.host, batch, numbers, rows))
        adapters = self.model.adapters.step(batch.adapters, size)
        key = key if adapters is None else (*key, adapters.shape)
        key = key if shared is None else (*key, *shared.key)
        buffers = self._graph_buffers()
        step = DeviceStep(
            self._fixed.device,
            rows,
            size,
            singles=singles,
            items=items,
            shared=shared,
            needed=needed,
            adapters=adapters,
        )
        self._graphs.run(key, lambda: self.model.forward(step, buffers, _unmarked))
        return buffers.x[: batch.rows]

    def _send_parts(self, parts: StepParts) -> tuple[Tensor, Tensor, Tensor | None]:
        """The singles, the items and the needed rows of a captured step, where it looks for them."""
        self._fixed_parts.wait()
        host, device, found = self._fixed_parts.host, self._fixed_parts.device, []
        for i, numbers in enumerate((parts.items, parts.singles, parts.needed)):
            place = slice(i * PART_INTS, i * PART_INTS + len(numbers))
            host[place] = numbers
            found.append(device[place])
        self._fixed_parts.send(2 * PART_INTS + len(parts.needed))
        items, singles, needed = found
        return singles, items.view(-1, 2), needed if len(needed) else None

    def _launch(
        self, batch: Batch, numbers: StepNumbers, rows: int, hooks: Hooks | None, shared: SharedStep | None
    ) -> Tensor:
        """A step of any number of rows, kernel by kernel: long segments on the matrix units, other rows one by one."""
        count, prompts = batch.rows, find_prompts(batch) if self.model.takes_prompts else []
        parts = StepParts.of(batch, self.model.chunk, prompts)
        needed = [] if self.model.deterministic or hooks is not None else parts.needed
        places, used = [], even(self._layout.size(numbers, rows))
        for some in (parts.items, parts.singles, needed):
            places.append(slice(used, used + len(some)))
            used += even(len(some))
        if used > len(self._free):
            self._free.grow(2 * used)
        self._free.wait()
        host, device = self._free.host, self._free.device
        self._layout.fill(host, batch, numbers, rows)
        for place, some in zip(places, (parts.items, parts.singles, needed), strict=True):
            host[place] = some
        self._free.send(used)
        step = DeviceStep(
            device,
            rows,
            count,
            singles=device[places[1]],
            items=device[places[0]].view(-1, 2) if parts.items else None,
            prompts=prompts,
            shared=shared,
            needed=device[places[2]] if needed else None,
            hooks=hooks,
            hooks_from=batch.decode_count,
            adapters=self.model.adapters.step(batch.adapters, None),
        )
        if self._free_buffers is None or self._free_buffers.rows < count:
            self._free_buffers = None  # the old ones go before the new ones come
            self._free_buffers = Buffers(self.decoder, count)
        return self.model.forward(step, self._free_buffers, self.profiler.mark)

    def _graph_buffers(self) -> Buffers:
        if self._fixed_buffers is None:
            self._fixed_buffers = Buffers(self.decoder, CHUNK_SIZES[-1])
        return self._fixed_buffers

    def sample(self, batch: Batch, logits: Tensor, masks: Sequence[DecodeMask | None]) -> Callable[[], list[int]]:
        """Have decode rows sampled; the function that is returned waits for the tokens."""
        assert batch.decode is not None
        words = [None if mask is None else mask.words() for mask in masks]
        with torch.inference_mode(), self._where():
            return self._decode_reader.sample_rows(batch.decode, logits, words)

    def probe(self, batch: Batch, logits: Tensor) -> Callable[[], list[RowValues | None]]:
        """Have the probes of decode rows answered; the function that is returned waits for their values."""
        assert batch.decode is not None
        with torch.inference_mode(), self._where():
            return self._decode_reader.probe_rows(batch.decode, logits)

    def finish(self, step: CudaStep) -> list[SegmentResult]:
        """Wait for the values of a step's segments."""
        with torch.inference_mode(), self._where():
            values = {} if step.read is None else step.read()
        step.is_over = True
        if self._last_read is not None and self._last_read[0] is step:
            self._last_read = None  # it keeps no adapter alive
        if step.is_measured:
            self.profiler.end(step_bytes(self.decoder, step.batch, self.page_size, self.pool.width))
        return [
            SegmentResult({index: values[i, index] for index, _, _ in segment.readouts}, step.kept[i])
            for i, segment in enumerate(step.batch.segments)
        ]


class CudaStep:
    """A step in flight: its values, and the logits [N, V] of its decode rows, are on their way."""

    def __init__(self, runner: CudaRunner, batch: Batch, *, is_measured: bool) -> None:
        self._runner, self.batch, self.is_measured = runner, batch, is_measured
        self.logits: Tensor | None = None
        self.kept: Sequence[Tensor | None] = (None,) * len(batch.segments)
        self.read: Callable[[], Values] | None = None
        self.is_over = False  # nobody needs what its readers hold
        self._tokens: Callable[[], list[int]] | None = None
        self._probed: Callable[[], list[RowValues | None]] | None = None
        self._failed: dict[int, HeadwayError] = {}

    def masks(self, masks: Sequence[DecodeMask | None]) -> None:
        usable: list[DecodeMask | None] = []
        for i, mask in enumerate(masks):
            try:
                if mask is not None:
                    mask.words()  # waits for it
                usable.append(mask)
            except HeadwayError as error:  # there is no mask for this row; the others go on
                self._failed[i] = error
                usable.append(None)
        assert self.logits is not None
        self._tokens = self._runner.sample(self.batch, self.logits, usable)
        if self.batch.decode is not None and self.batch.decode.probes is not None:
            self._probed = self._runner.probe(self.batch, self.logits)

    def result(self) -> StepResult:
        tokens: list[int | HeadwayError] = []
        if self.batch.decode is not None:
            assert self._tokens is not None
            tokens += self._tokens()
        probed: list[RowValues] = []
        for i, values in enumerate([] if self._probed is None else self._probed()):
            probed.append(values or ())
            token = tokens[i]
            if values is None and isinstance(token, int) and token >= 0:
                tokens[i] = UNDECIDED
        for i, error in self._failed.items():
            tokens[i] = error
        return StepResult(tokens, self._runner.finish(self), probed)


def _unmarked(name: str) -> None:
    """No time is taken of a step that is not measured, nor of what may be captured: waiting would end the capture."""


def _kept(batch: Batch, x: Tensor) -> list[Tensor | None]:
    """Each segment's last row, where it is wanted: copies, as the next step writes where x is."""
    if len(batch.segments) <= FEW or len(x) > SIZES[-1]:  # their rows must not keep all of x alive
        return [x[s.rows[-1]].clone() if s.keep_last else None for s in batch.segments]
    rows = x.clone().unbind()
    return [rows[s.rows[-1]] if s.keep_last else None for s in batch.segments]


def _needed(batch: Batch) -> list[int]:
    """The rows whose final residual somebody reads, with some twice for a size that graphs have; none if most rows are
    read."""
    first = batch.decode_count
    rows = list(range(first))
    for segment in batch.segments:
        read = {row for _, row, _ in segment.readouts if row != BEFORE}
        rows += sorted(first + row for row in (read | {segment.rows[-1]} if segment.keep_last else read))
    rows = rows or [0]
    size = padded(len(rows), NEEDED_SIZES)
    return [] if size is None or 2 * size > batch.rows else rows + rows[:1] * (size - len(rows))


def _attends_much(batch: Batch) -> bool:
    """Whether long segments attend to so much that the matrix units pay."""
    return sum(len(s.rows) * (int(s.slots[-1]) + 1) for s in batch.segments if len(s.rows) > FEW) > MUCH
