"""The native runner: a frozen batch through the library's one call for a whole step.

Same batches, same values as the torch runner. It has nothing to fall back for: hidden states and queries are tapped on
the way, and attention scores are read from the pages afterwards. A row's bits never depend on its neighbours here, so
deterministic mode costs nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headway.base.brle import Brle
from headway.kernels.attention import scores
from headway.kernels.native import library
from headway.kernels.native.library import Team, check
from headway.kernels.native.products import float_rows, linear, matrix
from headway.kernels.norm import rms_norm
from headway.kernels.packed import LANES, Packed
from headway.kv.pool import Pool
from headway.models.decoder import Taps
from headway.models.packed import MATRICES, PackedDecoder, PackedLayer
from headway.runtime.batch import Batch, Segment
from headway.runtime.plan import dense_mask, segment_slots, windowed
from headway.runtime.profile import Profiler
from headway.runtime.readout import Reader, make_taps
from headway.runtime.runner import SegmentResult, step_bytes


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
        assert kv.shape[3:] == (c.kv_heads, page_size, c.head_dim), "the pool is not laid out by head"
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
        wide = -(-w.n // LANES) * LANES
        y = torch.empty(len(x), wide)
        x = float_rows(x, w.k)
        call = self.team.calls.hw_head
        check(call(self.team.handle, self._struct, x.data_ptr(), len(x), 1, y.data_ptr(), wide))
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

    def product(self, x: Tensor, w: Packed) -> Tensor:
        return linear(self.team, x, w)


class NativeRunner:
    """Runs batches on the native step."""

    def __init__(self, decoder: PackedDecoder, pool: Pool, page_size: int, *, team: Team, profiler: Profiler) -> None:
        self.model = NativeModel(decoder, pool, page_size, team)
        self.decoder, self.pool, self.page_size, self.profiler = decoder, pool, page_size, profiler
        self.reader = Reader(self.model, None)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[SegmentResult]:
        """Apply the edits, run the model over the rows, read what was asked."""
        self.pool.apply(batch.edits)
        taps = make_taps(batch, self.model, self.page_size)
        self.profiler.begin(len(batch.write_rows))
        x = self._forward(batch, taps) if len(batch.tokens) else None
        values = self.reader.read(batch, x, taps, self.profiler.mark)
        sizes = step_bytes(self.decoder, batch, self.page_size)
        sizes["rope"] += sizes.pop("kv write")  # keys and values go to their pages as they are turned
        self.profiler.end(sizes)
        results = []
        for i, segment in enumerate(batch.segments):
            state = x[segment.rows[-1]].clone() if x is not None and segment.keep_last else None
            results.append(SegmentResult({index: values[i, index] for index, _, _ in segment.readouts}, state))
        return results

    def _forward(self, batch: Batch, taps: Taps) -> Tensor:
        c, rows = self.model.config, len(batch.tokens)
        out = torch.empty(rows, c.hidden_size)
        write = np.full(rows, -1, np.int32)
        write[batch.write_rows] = batch.write_slots
        hidden = [(l, int(r)) for l, found in taps.hidden.items() for r in found]
        queries = [(l, int(g.rows[0, 0])) for l, found in taps.scores.items() for g in found]
        hidden_out = torch.empty(len(hidden), c.hidden_size)
        query_out = torch.empty(len(queries), c.heads, c.head_dim)
        runs = [_runs(batch.segments, window, self.page_size) for window in self.model.windows]
        runs_at, run_pairs = _pointers([at for at, _ in runs]), _pointers([pairs for _, pairs in runs])
        phases = np.zeros(len(library.PHASES)) if self.profiler.measuring else None
        arrays = {  # named, so that they live until the call is over
            "tokens": _int32(batch.tokens),
            "positions": _int32(batch.positions),
            "write_slots": write,
            "segment_rows": _ends([len(s.rows) for s in batch.segments]),
            "segment_pages": _ends([len(s.pages) for s in batch.segments]),
            "pages": _joined([s.pages for s in batch.segments]),
            "numbers": _joined([s.numbers for s in batch.segments]),
            "tap_layers": _int32([l for l, _ in hidden]),
            "tap_rows": _int32([r for _, r in hidden]),
            "query_layers": _int32([l for l, _ in queries]),
            "query_rows": _int32([r for _, r in queries]),
        }
        self.model.run(
            library.Step(
                rows=rows,
                segments=len(batch.segments),
                mask_sets=len(runs),
                taps=len(hidden),
                query_taps=len(queries),
                **{name: array.ctypes.data for name, array in arrays.items()},
                runs_at=ctypes.addressof(runs_at),
                runs=ctypes.addressof(run_pairs),
                hidden_out=hidden_out.data_ptr(),
                query_out=query_out.data_ptr(),
                out=out.data_ptr(),
                phases=None if phases is None else phases.ctypes.data,
            )
        )
        if phases is not None:
            self.profiler.add(dict(zip(library.PHASES, phases.tolist(), strict=True)), _calls(c.layers))
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
                found.append(scores(queries[at : at + 1], self.pool.kv[l, 0], alone, 1.0))
                at += 1


def _calls(layers: int) -> dict[str, int]:
    """How often each phase of a step runs."""
    return {**dict.fromkeys(library.PHASES, layers), "embed": 1, "norm": 2 * layers}


def _runs(segments: Sequence[Segment], window: int | None, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """What every row attends to: where its runs begin, [T + 1], and pairs of first slot and slot behind the last."""
    counts: list[np.ndarray] = []
    pairs: list[np.ndarray] = []
    for segment in segments:
        plain = _plain(segment, window)
        if plain is not None:
            counts.append(np.ones(len(plain), np.int32))
            pairs.append(plain)
            continue
        found = [list(r.intervals()) for r in _rows(segment, window, page_size)]
        counts.append(_int32([len(f) for f in found]))
        pairs.append(np.array([p for f in found for p in f], np.int32).reshape(-1, 2))
    at = np.zeros(sum(map(len, counts)) + 1, np.int32)
    np.cumsum(np.concatenate(counts) if counts else [], out=at[1:])
    return at, np.ascontiguousarray(np.concatenate(pairs), np.int32) if pairs else np.zeros((0, 2), np.int32)


def _plain(segment: Segment, window: int | None) -> np.ndarray | None:
    """One run for each row, [R, 2], where no row has a mask of its own and positions go with slots."""
    if any(m is not None for m in segment.masks):
        return None
    first = np.zeros(len(segment.slots), np.int64)
    if window is not None:
        known = segment.slot_positions
        if (np.diff(known) <= 0).any():
            return None
        first = np.searchsorted(known, known[segment.slots] - window, side="right")
    return np.stack([first, segment.slots + 1], axis=1).astype(np.int32)


def _rows(segment: Segment, window: int | None, page_size: int) -> list[Brle]:
    if window is None:
        return [Brle.ones(int(s) + 1) if m is None else m for s, m in zip(segment.slots, segment.masks, strict=True)]
    slots = segment_slots(segment, page_size)
    mask = windowed(segment, dense_mask(segment, page_size), window, page_size)
    found = []
    for row in mask:
        bits = np.zeros(int(slots[-1]) + 1, dtype=bool)
        bits[slots[row]] = True
        found.append(Brle.from_bool(bits))
    return found


def _int32(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.int32)


def _ends(sizes: Sequence[int]) -> np.ndarray:
    at = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=at[1:])
    return at


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
