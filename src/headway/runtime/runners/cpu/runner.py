"""The native runner: a frozen batch through the library's one call for a whole step, decode rows and chunks together.

Same batches, same values as the torch runner. It never falls back: hidden states and queries are hooked on the way, and
attention scores are read from the pages afterwards. A row's bits never depend on its neighbors here, so deterministic
mode costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.base.arrays import empty
from headway.base.errors import HeadwayError
from headway.base.rng import uniforms
from headway.base.specs.adapters import Mixes
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import NO_TOKEN, Sampling
from headway.base.system.device import AnyDevice
from headway.kernels.host import sampling
from headway.kernels.host.attention import row_scores
from headway.kernels.host.ordered import layer_norm, rms_norm
from headway.kernels.host.quantized import FLOATS
from headway.kernels.host.sampling import RowSampler
from headway.kernels.native import library
from headway.kernels.native import sampling as drawing
from headway.kernels.native.library import ThreadPool, check
from headway.kernels.native.matmul import float_rows
from headway.kv.allocator import Edit
from headway.kv.pool import HostPool
from headway.models.adapters.bound import BoundAdapter
from headway.models.config import ModelConfig
from headway.models.hooks import Hooks
from headway.models.quantized.cpu import QuantizedDecoder
from headway.runtime.batch import Batch, DecodeRows, Segment
from headway.runtime.passes import BEFORE, DecodeMask, Readout
from headway.runtime.profile import PHASES, Profiler, step_bytes
from headway.runtime.readout import SLAB, Reader, make_hooks, not_a_number, plainly_greedy, segment_results
from headway.runtime.runners.adapter_rows import add_to_products, has_head
from headway.runtime.runners.base import DECODE_LIMIT, SegmentResult, StepResult
from headway.runtime.runners.cpu.adapters import NativeAdapter
from headway.runtime.runners.cpu.arrays import StepArrays
from headway.runtime.runners.cpu.weights import BoundWeights

KV_KINDS = {dtype: library.KINDS.index(kind) for kind, dtype in FLOATS.items()}


class NativeModel:
    """The quantized weights, bound to the pages, as the reader and the runner use them."""

    def __init__(self, decoder: QuantizedDecoder, pool: HostPool, page_size: int, thread_pool: ThreadPool) -> None:
        self.decoder, self.pool, self.thread_pool, self.config = decoder, pool, thread_pool, decoder.config
        self.device: AnyDevice = decoder.device
        self.functions = sampling
        self.windows = tuple(dict.fromkeys(decoder.config.windows))
        self._struct = self._bind(page_size)

    def _bind(self, page_size: int) -> library.ModelStruct:
        d, c = self.decoder, self.config
        d.check()
        self._bound = BoundWeights(d, self.windows)
        kv = self.pool.raw
        assert kv.flags.c_contiguous
        assert kv.size == c.kv_values_per_token * page_size * self.pool.pages
        for layer, keys, values in zip(c.kv_layers, self.pool.keys, self.pool.values, strict=True):
            assert not kv.size or _lie_well(c, layer, page_size, keys, values), "keys and values do not lie well"
        struct = self._bound.model()
        if (states := self.pool.states) is not None:
            struct.states, (_, struct.state_layers, struct.state_numbers) = states.ctypes.data, states.shape
        struct.page_size, struct.kv = page_size, kv.ctypes.data
        struct.kv_pages, struct.kv_kind = self.pool.pages, KV_KINDS[kv.dtype]
        return struct

    def run(self, step: library.StepStruct) -> None:
        check(self.thread_pool.calls.hw_forward(self.thread_pool.handle, self._struct, step))

    # -- what the reader asks for ----------------------------------------------------------------------------------

    def finish(self, x: np.ndarray, tile: int | None) -> np.ndarray:
        """The final norm of residual rows [R, E]."""
        d, eps = self.decoder, self.config.norm_eps
        if self.config.description.norm == "layer":
            return layer_norm(x, d.final_norm, d.final_norm_bias, eps)
        return rms_norm(x, d.final_norm, eps)

    def logits(self, x: np.ndarray, tile: int | None) -> np.ndarray:
        """Logits [R, V] of residual rows [R, E]."""
        return self._head(x, finish=True)

    def products_of(self, x: np.ndarray, tile: int | None) -> np.ndarray:
        """What the output matrix makes of residual rows [R, E]: [R, V]."""
        return self._head(x, finish=False)

    def _head(self, x: np.ndarray, *, finish: bool) -> np.ndarray:
        w = self.decoder.output
        y = empty((len(x), w.padded_n))
        x = float_rows(x, w.k)
        call, handle = self.thread_pool.calls.hw_logits, self.thread_pool.handle
        check(call(handle, self._struct, x.ctypes.data, len(x), 1, finish, y.ctypes.data, w.padded_n))
        return y[:, : w.n]

    def finish_logits(self, products: np.ndarray) -> np.ndarray:
        """Logits of what the output matrix gave and adapters have added to, in its place."""
        assert products.strides[1] == products.itemsize
        call, stride = self.thread_pool.calls.hw_finish_logits, products.strides[0] // products.itemsize
        check(call(self.thread_pool.handle, self._struct, products.ctypes.data, len(products), stride))
        return products

    def best(self, logits: np.ndarray) -> tuple[list[bool], list[int] | None]:
        """For each row whether it has a NaN, and its first largest."""
        assert logits.dtype == np.float32
        assert logits.strides[1] == logits.itemsize
        rows, vocab = logits.shape
        best, bad = np.empty(rows, np.int64), np.empty(rows, np.uint8)
        handle, stride = self.thread_pool.handle, logits.strides[0] // logits.itemsize
        call = self.thread_pool.calls.hw_argmax
        check(call(handle, logits.ctypes.data, rows, vocab, stride, best.ctypes.data, bad.ctypes.data))
        return bad.astype(bool).tolist(), best.tolist()

    def sample(self, logits: np.ndarray, samplers: Sequence[RowSampler]) -> list[int]:
        """The token sampled at each row."""
        return drawing.sample(self.thread_pool, logits, samplers)


def _lie_well(c: ModelConfig, layer: int, page_size: int, keys: np.ndarray, values: np.ndarray) -> bool:
    """Whether a layer's keys and values lie as the native step reads them."""
    dim, item = c.kv_shape(layer).dim, keys.itemsize
    latent, head = c.description.latent is not None, page_size * dim * item
    by_slot = (dim * item, dim * item if latent else head, item)
    return (keys.strides[1:], values.strides[1:]) == (by_slot if latent else (item, head, page_size * item), by_slot)


class NativeRunner:
    """Computes batches with the native step."""

    overlaps = False

    def __init__(
        self, decoder: QuantizedDecoder, pool: HostPool, page_size: int, *, thread_pool: ThreadPool, profiler: Profiler
    ) -> None:
        self.model = NativeModel(decoder, pool, page_size, thread_pool)
        self.decoder, self.pool, self.page_size, self.profiler = decoder, pool, page_size, profiler
        self.reader = Reader(self.model, None)
        self._arrays = StepArrays(self.model.windows, page_size)
        self._logits = empty((0, 0))  # of the rows that the step itself reads

    @property
    def decode_limit(self) -> int:
        return 0 if self.profiler.enabled else DECODE_LIMIT

    def reads(self, what: Probe, how: Sampling) -> bool:
        return False  # the native step samples decode rows itself

    def samples(self, how: Sampling) -> bool:
        return not how.penalizes  # everything that needs no history

    def load_adapter(self, adapter: BoundAdapter) -> NativeAdapter:
        return NativeAdapter(adapter, self.decoder.config, half=self.decoder.is_quantized)

    def edit(self, edits: Sequence[Edit]) -> None:
        self.pool.apply(edits)

    def begin(self, batch: Batch) -> NativeStep:
        """Compute the rows now; decode rows are sampled when their masks are there."""
        self.profiler.begin(batch.computed)
        count = batch.decode_count
        reads = [(i, index, row) for i, s in enumerate(batch.segments) for index, row, _ in s.readouts]
        if batch.rows and self._reads_in_step(batch, reads):
            return self._read_in_step(batch, reads)
        hooks = make_hooks(batch, self.model, self.page_size)
        x, step = None, NativeStep(self, batch)
        if batch.rows:
            x, step.decode = self._forward(batch, hooks)
        x = None if x is None else x[count:]
        step.segments = segment_results(batch, x, self.reader.read(batch, x, hooks, self.profiler.mark))
        return step

    @staticmethod
    def _reads_in_step(batch: Batch, reads: list[tuple[int, int, int]]) -> bool:
        """Whether all that is read of the segments is the likeliest token of a few rows."""
        return len(reads) <= SLAB and all(_only_greedy(s) for s in batch.segments)

    def _read_in_step(self, batch: Batch, reads: list[tuple[int, int, int]]) -> NativeStep:
        """Run with the head and the greedy choice in the same call."""
        count, step = batch.decode_count, NativeStep(self, batch)
        native = self._arrays.fill(batch)
        rows = [*range(count), *(count + row for _, _, row in reads)]
        best, bad = self._read(native, rows, batch)
        x = self._run(native)
        if native.unfinished:
            self._adapt_head(x[rows], _mixes(batch, rows), best, bad)
        step.decode = self._decoded(batch, best, bad)
        values: dict[tuple[int, int], object] = {}
        tokens = zip(reads, best[count:].tolist(), bad[count:].tolist(), strict=True)
        for (segment, index, _), token, is_bad in tokens:
            values[segment, index] = not_a_number() if is_bad else token
        step.segments = segment_results(batch, x[count:], values)
        return step

    def _read(self, step: library.StepStruct, rows: Sequence[int], batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Have the step compute the logits of these rows, the likeliest token of each, and whether it has a NaN.

        Where an adapter changes the head it leaves what the output matrix gave; `_adapt_head` does the rest.
        """
        w, count = self.decoder.output, len(rows)
        if len(self._logits) < count:
            self._logits = empty((count, w.padded_n))
        best, bad = np.empty(count, np.int64), np.empty(count, np.uint8)
        step.reads, step.read_rows = count, self._arrays.put(rows)
        step.logits, step.logits_stride = self._logits.ctypes.data, w.padded_n
        step.best, step.bad = best.ctypes.data, bad.ctypes.data
        step.unfinished = has_head(_mixes(batch, rows))
        return best, bad

    def _adapt_head(self, x: np.ndarray, mixes: Mixes, best: np.ndarray, bad: np.ndarray) -> None:
        """Add what adapters of the head make of rows x to what the step has left unfinished of them, and finish it."""
        products = self._logits[: len(x), : self.decoder.output.n]
        add_to_products(products, self.model.finish(x, None), mixes)
        bad[:], best[:] = self.model.best(self.model.finish_logits(products))

    def _decoded(self, batch: Batch, best: np.ndarray, bad: np.ndarray) -> DecodeLogits | None:
        count = batch.decode_count
        if batch.decode is None:
            return None
        logits = self._logits[:count, : self.decoder.output.n]
        return DecodeLogits(self.model, batch.decode, logits, best[:count].tolist(), bad[:count])

    def _run(self, step: library.StepStruct) -> np.ndarray:
        out = empty((step.rows, self.model.config.hidden_size))
        phases = np.zeros(len(PHASES)) if self.profiler.measuring else None
        step.out, step.phases = out.ctypes.data, None if phases is None else phases.ctypes.data
        self.model.run(step)
        if phases is not None:
            self.profiler.add(dict(zip(PHASES, phases.tolist(), strict=True)), _calls(self.model.config.layers))
        return out

    def _forward(self, batch: Batch, hooks: Hooks) -> tuple[np.ndarray, DecodeLogits | None]:
        """Run with hooks on hidden states and queries; decode rows are read in the step, the others are not."""
        c, step, put, count = self.model.config, self._arrays.fill(batch), self._arrays.put, batch.decode_count
        hidden = [(l, int(r)) for l, rows in hooks.hidden.items() for r in rows]
        queries = [(l, int(g.rows[0, 0])) for l, groups in hooks.scores.items() for g in groups]
        hidden_out = empty((len(hidden), c.hidden_size))
        query_out = empty((len(queries), c.heads, max(c.kv_shape(layer).dim for layer in range(c.layers))))
        step.hidden_count, step.query_count = len(hidden), len(queries)
        step.hidden_layers, step.hidden_rows = put([l for l, _ in hidden]), put([count + r for _, r in hidden])
        step.query_layers, step.query_rows = put([l for l, _ in queries]), put([count + r for _, r in queries])
        step.hidden_out, step.query_out = hidden_out.ctypes.data, query_out.ctypes.data
        best, bad = self._read(step, range(count), batch) if count else (np.empty(0), np.empty(0))
        x = self._run(step)
        self._collect(hooks, hidden_out, query_out)
        if step.unfinished:
            self._adapt_head(x[:count], _mixes(batch, range(count)), best, bad)
        return x, self._decoded(batch, best, bad)

    def _collect(self, hooks: Hooks, hidden: np.ndarray, queries: np.ndarray) -> None:
        at = 0
        for l, rows in hooks.hidden.items():
            hooks.hidden_out[l] = hidden[at : at + len(rows)]
            at += len(rows)
        at = 0
        for l, groups in hooks.scores.items():
            collected = hooks.scores_out[l] = []
            cap, sinks = self.model.config.description.attention_cap, self.decoder.layers[l].sinks
            c = self.model.config
            keys = self.pool.keys[c.kv_places[c.attention_layers.index(l)]]
            for group in groups:
                own = queries[at, :, : c.kv_shape(l).dim]
                collected.append(row_scores(own, keys, group, cap=cap, sinks=sinks))
                at += 1

    def profiled(self, batch: Batch) -> None:
        """The step is over: give its bytes to the profiler."""
        if self.profiler.measuring:
            sizes = step_bytes(self.decoder, batch, self.page_size, self.pool.width)
            sizes["rope"] += sizes.pop("kv write")  # keys and values go to their pages as they are rotated
            self.profiler.end(sizes)


def _mixes(batch: Batch, rows: Sequence[int]) -> Mixes:
    """The adapters of rows of a batch, decode rows first."""
    every = batch.adapters
    return () if every is None else [every[row] for row in rows]


class NativeStep:
    """A step whose rows are computed: results of its segments, and decode rows that are still to be sampled."""

    def __init__(self, runner: NativeRunner, batch: Batch) -> None:
        self._runner, self._batch = runner, batch
        self.segments: list[SegmentResult] = []
        self.decode: DecodeLogits | None = None

    def masks(self, masks: Sequence[DecodeMask | None]) -> None:
        assert self.decode is not None
        self.decode.sample(masks)

    def result(self) -> StepResult:
        self._runner.profiled(self._batch)
        return StepResult(() if self.decode is None else self.decode.tokens, self.segments)


class DecodeLogits:
    """The logits [N, V] of decode rows and the likeliest token of each; `tokens` once they are sampled."""

    def __init__(
        self, model: NativeModel, rows: DecodeRows, logits: np.ndarray, best: list[int], bad: np.ndarray
    ) -> None:
        self._model, self._rows, self._logits = model, rows, logits
        self.tokens: list[int | HeadwayError] = [*best]
        self._bad = np.flatnonzero(bad).tolist()

    def sample(self, masks: Sequence[DecodeMask | None]) -> None:
        """Sample a token at each row, among those that its mask allows."""
        rows, tokens, draws = self._rows, self.tokens, []
        sampled = [i for i, r in enumerate(rows.readouts) if masks[i] is not None or not plainly_greedy(r)]
        numbers = uniforms(rows.seeds, rows.positions.astype(np.uint64)).tolist() if sampled else []
        for i in sampled:
            try:
                mask = masks[i]
                allowed = None if mask is None else mask.result()
                draws.append((i, RowSampler(_sampling(rows.readouts[i]), uniform=numbers[i], allowed=allowed)))
            except HeadwayError as error:  # there is no mask for this row; the others go on
                tokens[i] = error
        if draws:
            which = [i for i, _ in draws]
            logits = self._logits if len(which) == len(rows) else self._logits[which]
            for i, token in zip(which, self._model.sample(logits, [draw for _, draw in draws]), strict=True):
                tokens[i] = token
        for i in self._bad:
            tokens[i] = NO_TOKEN


def _sampling(readout: Readout) -> Sampling:
    assert isinstance(readout.what, Sampling)
    return readout.what


def _calls(layers: int) -> dict[str, int]:
    """How often each phase of a step runs."""
    return {**dict.fromkeys(PHASES, layers), "embed": 1, "norm": 2 * layers, "head": 1, "sample": 1}


def _only_greedy(segment: Segment) -> bool:
    """Whether all that is read of a segment is the likeliest token of rows of this step."""
    return all(row != BEFORE and isinstance(r.what, Sampling) and plainly_greedy(r) for _, row, r in segment.readouts)
