"""The native runner: a frozen batch through the library's one call for a whole step.

Same batches, same values as the torch runner. It has nothing to fall back for: hidden states and queries are tapped on
the way, and attention scores are read from the pages afterwards. A row's bits never depend on its neighbours here, so
deterministic mode costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.rng import uniforms
from headway.base.samplers import Sampling
from headway.kernels.native import library
from headway.kernels.native import sampling as drawing
from headway.kernels.native.library import Team, check
from headway.kernels.native.matmul import float_rows, matrix
from headway.kernels.reference.attention import scores
from headway.kernels.reference.norm import rms_norm
from headway.kernels.reference.sampling import Draw
from headway.kv.pool import Pool
from headway.models.decoder import Taps
from headway.models.quantized.cpu import MATRICES, PackedDecoder, PackedLayer
from headway.runtime.batch import Batch, Rows, Segment
from headway.runtime.passes import BEFORE, Followed, Readout
from headway.runtime.profile import PHASES, Profiler
from headway.runtime.readout import SLAB, Reader, make_taps, not_a_number, plainly_greedy
from headway.runtime.runners.base import NO_TOKEN, SegmentResult, segment_results, step_bytes
from headway.runtime.runners.cpu.arrays import StepArrays

MOST_ROWS = 256


class NativeModel:
    """The packed weights, bound to the pages, as the reader and the runner use them."""

    def __init__(self, decoder: PackedDecoder, pool: Pool, page_size: int, team: Team) -> None:
        self.decoder, self.pool, self.team, self.config = decoder, pool, team, decoder.config
        self.device, self.dtype = decoder.device, decoder.dtype
        self.windows = tuple(dict.fromkeys(decoder.config.windows))
        self._struct = self._bind(page_size)

    def _bind(self, page_size: int) -> library.Model:
        d, c = self.decoder, self.config
        d.check()
        self._layers = (library.Layer * c.layers)(
            *(self._layer(layer, self.windows.index(c.windows[i])) for i, layer in enumerate(d.layers))
        )
        kv = self.pool.raw
        assert kv.dtype == torch.float32
        assert kv.is_contiguous()
        assert kv.shape[:2] == (c.layers, 2)
        inner = page_size * c.head_dim
        assert self.pool.keys.stride()[2:] == (1, inner, page_size), "keys do not lie as the native step wants"
        assert self.pool.values.stride()[2:] == (c.head_dim, inner, 1), "values do not lie as the native step wants"
        return library.Model(
            layers=c.layers,
            hidden=c.hidden_size,
            inner=c.intermediate_size,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            vocab=c.vocab_size,
            rope_half=len(d.inv_freq),
            page_size=page_size,
            eps=c.norm_eps,
            scale=c.head_dim**-0.5,
            rope_scale=c.rope.scale,
            inv_freq=d.inv_freq.data_ptr(),
            final_norm=d.final_norm.data_ptr(),
            layer=self._layers,
            embedding=matrix(d.embedding),
            output=matrix(d.output),
            kv=kv.data_ptr(),
            kv_pages=kv.shape[2],
        )

    @staticmethod
    def _layer(layer: PackedLayer, mask_set: int) -> library.Layer:
        parts = {name: matrix(getattr(layer, name)) for name in MATRICES}
        return library.Layer(
            **parts,
            norm_in=layer.input_norm.data_ptr(),
            norm_mlp=layer.mlp_norm.data_ptr(),
            q_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
            k_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
            mask_set=mask_set,
        )

    def run(self, step: library.Step) -> None:
        check(self.team.calls.hw_run(self.team.handle, self._struct, step))

    # -- what the reader asks for ----------------------------------------------------------------------------------

    def finish(self, x: Tensor, tile: int | None) -> Tensor:
        """The final norm of residual rows [R, E], each by itself."""
        return torch.cat([rms_norm(row[None], self.decoder.final_norm, self.config.norm_eps) for row in x])

    def logits(self, x: Tensor, tile: int | None) -> Tensor:
        """Logits [R, V] of residual rows [R, E]."""
        w = self.decoder.output
        y = torch.empty(len(x), w.wide)
        x = float_rows(x, w.k)
        call = self.team.calls.hw_head
        check(call(self.team.handle, self._struct, x.data_ptr(), len(x), 1, y.data_ptr(), w.wide))
        return y[:, : w.n]

    def best(self, logits: Tensor) -> tuple[list[bool], list[int] | None]:
        """For each row whether it has a NaN, and its first largest."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        rows, vocab = logits.shape
        best, bad = np.empty(rows, np.int64), np.empty(rows, np.uint8)
        handle, stride = self.team.handle, logits.stride(0)
        call = self.team.calls.hw_choose
        check(call(handle, logits.data_ptr(), rows, vocab, stride, best.ctypes.data, bad.ctypes.data))
        return bad.astype(bool).tolist(), best.tolist()

    def choose(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """The token drawn at each row."""
        return drawing.choose(self.team, logits, draws)


class NativeRunner:
    """Runs batches on the native step."""

    def __init__(self, decoder: PackedDecoder, pool: Pool, page_size: int, *, team: Team, profiler: Profiler) -> None:
        self.model = NativeModel(decoder, pool, page_size, team)
        self.decoder, self.pool, self.page_size, self.profiler = decoder, pool, page_size, profiler
        self.reader = Reader(self.model, None)
        self._arrays = StepArrays(self.model.windows, page_size)
        self._logits = torch.empty(0, 0)  # room for rows that are read at once

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[SegmentResult]:
        """Apply the edits, run the model over the rows, read what was asked."""
        if batch.edits:
            self.pool.apply(batch.edits)
        self.profiler.begin(len(batch.write_rows))
        asked = [(i, index, row) for i, s in enumerate(batch.segments) for index, row, _ in s.readouts]
        if len(batch.tokens) and len(asked) <= SLAB and all(_at_once(s) for s in batch.segments):
            x, values = self._read_at_once(batch, asked)
        else:
            taps = make_taps(batch, self.model, self.page_size)
            x = self._forward(batch, taps) if len(batch.tokens) else None
            values = self.reader.read(batch, x, taps, self.profiler.mark)
        if self.profiler.measuring:
            sizes = step_bytes(self.decoder, batch, self.page_size)
            sizes["rope"] += sizes.pop("kv write")  # keys and values go to their pages as they are turned
            self.profiler.end(sizes)
        return segment_results(batch, x, values)

    @property
    def measures(self) -> bool:
        """Whether steps are being measured."""
        return self.profiler.enabled

    @property
    def most_rows(self) -> int:
        """How many rows go on by themselves in one step, at most: each has its logits."""
        return MOST_ROWS

    def draws(self, how: Sampling) -> bool:
        """Whether rows that go on by themselves can draw so: in every way that takes no history."""
        return not how.penalizes

    @torch.inference_mode()
    def begin_rows(self, rows: Rows) -> NativeRows:
        """Compute the rows, here and now."""
        step, count = self._arrays.fill_rows(rows), len(rows)
        best, bad = self._room_for(step, count)
        self._run(step)
        return NativeRows(self.model, rows, self._logits[:count, : self.decoder.output.n], best.tolist(), bad)

    def _room_for(self, step: library.Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the step puts the logits of rows it reads, the likeliest token of each, and whether it has a NaN."""
        w = self.decoder.output
        if len(self._logits) < count:
            self._logits = torch.empty(count, w.wide)
        best, bad = np.empty(count, np.int64), np.empty(count, np.uint8)
        step.logits, step.logits_stride = self._logits.data_ptr(), w.wide
        step.best, step.bad = best.ctypes.data, bad.ctypes.data
        return best, bad

    def _read_at_once(
        self, batch: Batch, asked: list[tuple[int, int, int]]
    ) -> tuple[Tensor, dict[tuple[int, int], object]]:
        """Rows of which only the likeliest token is wanted: the head and the choice in the same call."""
        step = self._arrays.fill(batch)
        best, bad = self._room_for(step, len(asked))
        step.reads, step.read_rows = len(asked), self._arrays.put([row for _, _, row in asked])
        x = self._run(step)
        values: dict[tuple[int, int], object] = {}
        for (segment, index, _), token, wrong in zip(asked, best.tolist(), bad.tolist(), strict=True):
            values[segment, index] = not_a_number() if wrong else token
        return x, values

    def _run(self, step: library.Step) -> Tensor:
        # Not torch.empty, which lets another thread have the interpreter: the device would wait for what that runs.
        out = torch.from_numpy(np.empty((step.rows, self.model.config.hidden_size), np.float32))
        phases = np.zeros(len(PHASES)) if self.profiler.measuring else None
        step.out, step.phases = out.data_ptr(), None if phases is None else phases.ctypes.data
        self.model.run(step)
        if phases is not None:
            self.profiler.add(dict(zip(PHASES, phases.tolist(), strict=True)), _calls(self.model.config.layers))
        return out

    def _forward(self, batch: Batch, taps: Taps) -> Tensor:
        c, step, put = self.model.config, self._arrays.fill(batch), self._arrays.put
        hidden = [(l, int(r)) for l, found in taps.hidden.items() for r in found]
        queries = [(l, int(g.rows[0, 0])) for l, found in taps.scores.items() for g in found]
        hidden_out = torch.empty(len(hidden), c.hidden_size)
        query_out = torch.empty(len(queries), c.heads, c.head_dim)
        step.taps, step.query_taps = len(hidden), len(queries)
        step.tap_layers, step.tap_rows = put([l for l, _ in hidden]), put([r for _, r in hidden])
        step.query_layers, step.query_rows = put([l for l, _ in queries]), put([r for _, r in queries])
        step.hidden_out, step.query_out = hidden_out.data_ptr(), query_out.data_ptr()
        out = self._run(step)
        self._tapped(taps, hidden_out, query_out)
        return out

    def _tapped(self, taps: Taps, hidden: Tensor, queries: Tensor) -> None:
        at = 0
        for l, rows in taps.hidden.items():
            taps.hidden_found[l] = hidden[at : at + len(rows)]
            at += len(rows)
        at = 0
        for l, groups in taps.scores.items():
            found = taps.scores_found[l] = []
            for group in groups:
                alone = replace(group, rows=torch.zeros_like(group.rows))
                found.append(scores(queries[at : at + 1], self.pool.keys[l], alone, 1.0))
                at += 1


class NativeRows:
    """A step of rows that go on by themselves: their logits [N, V] are there, with the likeliest token of each."""

    def __init__(self, model: NativeModel, rows: Rows, logits: Tensor, best: list[int], bad: np.ndarray) -> None:
        self._model, self._rows, self._logits = model, rows, logits
        self._found: list[int | HeadwayError] = [*best]
        self._bad = np.flatnonzero(bad).tolist()

    @torch.inference_mode()
    def draw(self, masks: Sequence[Followed | None]) -> None:
        """Draw a token at each row, among those that its mask allows."""
        rows, found, draws = self._rows, self._found, []
        drawn = [i for i, r in enumerate(rows.readouts) if masks[i] is not None or not plainly_greedy(r)]
        numbers = uniforms(rows.seeds, rows.positions.astype(np.uint64)).tolist() if drawn else []
        for i in drawn:
            try:
                mask = masks[i]
                allowed = None if mask is None else torch.from_numpy(mask.result())
                draws.append((i, Draw(_sampling(rows.readouts[i]), uniform=numbers[i], allowed=allowed)))
            except HeadwayError as error:  # there is no mask for this row; the others go on
                found[i] = error
        if draws:
            which = [i for i, _ in draws]
            logits = self._logits if len(which) == len(rows) else self._logits[which]
            for i, token in zip(which, self._model.choose(logits, [draw for _, draw in draws]), strict=True):
                found[i] = token
        for i in self._bad:
            found[i] = NO_TOKEN

    def tokens(self) -> list[int | HeadwayError]:
        """What was drawn."""
        return self._found


def _sampling(readout: Readout) -> Sampling:
    assert isinstance(readout.what, Sampling)
    return readout.what


def _calls(layers: int) -> dict[str, int]:
    """How often each phase of a step runs."""
    return {**dict.fromkeys(PHASES, layers), "embed": 1, "norm": 2 * layers, "head": 1, "sample": 1}


def _at_once(segment: Segment) -> bool:
    """Whether all that is read of it is the likeliest token of rows of this step."""
    return all(row != BEFORE and isinstance(r.what, Sampling) and plainly_greedy(r) for _, row, r in segment.readouts)
