"""What every row of a batch attends to, as runs of slots: the form in which native and CUDA kernels read masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.base.specs.brle import Brle
from headway.kernels.host.attention import ChunkWindow, Window
from headway.runtime.batch import Batch, DecodeRows, Segment
from headway.runtime.runners.attention_groups import dense_mask, segment_slots, windowed

Numbers = Sequence[int] | np.ndarray
Runs = tuple[Numbers, Numbers]  # where each row's runs begin [T + 1]; first and end slot of each run, flat


def mask_runs(batch: Batch, window: Window, page_size: int) -> Runs:
    """The runs of every row, decode rows first."""
    if batch.decode is None:
        return _segment_runs(batch.segments, window, page_size)
    at, pairs = _decode_runs(batch.decode, window)
    if not batch.segments:
        return at, pairs
    more_at, more_pairs = _segment_runs(batch.segments, window, page_size)
    return np.concatenate((at, np.asarray(more_at)[1:] + at[-1])), np.concatenate((pairs, np.asarray(more_pairs)))


def _decode_runs(rows: DecodeRows, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a model with windows have no masks, and stand at their own positions."""
    count = len(rows)
    if rows.masks is None:
        pairs = np.zeros((count, 2), np.int64)
        pairs[:, 1] = rows.slots + 1
        if isinstance(window, ChunkWindow):
            pairs[:, 0] = rows.slots // window.size * window.size
        elif window is not None:
            pairs[:, 0] = np.maximum(0, pairs[:, 1] - window)
        return np.arange(count + 1), pairs.ravel()
    assert window is None
    ends, flat = [0], []
    for mask, slot in zip(rows.masks, rows.slots.tolist(), strict=True):
        for interval in ((0, slot + 1),) if mask is None else mask.intervals():
            flat += interval
        ends.append(len(flat) // 2)
    return np.array(ends), np.array(flat)


def _segment_runs(segments: Sequence[Segment], window: Window, page_size: int) -> Runs:
    if window is None and all(len(s.rows) == 1 and s.masks[0] is None for s in segments):
        pairs: list[int] = []
        for segment in segments:  # the common case, without an array for each
            pairs += (0, int(segment.slots[0]) + 1)
        return range(len(segments) + 1), pairs
    counts: list[np.ndarray] = [np.zeros(1, np.int64)]
    parts: list[np.ndarray] = []
    for segment in segments:
        plain = _plain(segment, window)
        if plain is not None:
            counts.append(np.ones(len(plain), np.int64))
            parts.append(plain.ravel())
            continue
        intervals = [list(r.intervals()) for r in _rows(segment, window, page_size)]
        counts.append(np.array([len(row) for row in intervals]))
        parts.append(np.array([pair for row in intervals for pair in row], np.int64).ravel())
    return np.cumsum(np.concatenate(counts)), np.concatenate(parts) if parts else []


def _plain(segment: Segment, window: Window) -> np.ndarray | None:
    """One run for each row [R, 2], if no row has a mask of its own and positions go up with slots."""
    if segment.masks.count(None) < len(segment.masks):
        return None
    first = np.zeros(len(segment.slots), np.int64)
    if window is not None:
        known = segment.slot_positions
        if (np.diff(known) <= 0).any():
            return None
        own = known[segment.slots]
        if isinstance(window, ChunkWindow):
            first = np.searchsorted(known, own // window.size * window.size)
        else:
            first = np.searchsorted(known, own - window, side="right")
    return np.stack([first, segment.slots + 1], axis=1)


def _rows(segment: Segment, window: Window, page_size: int) -> list[Brle]:
    if window is None:
        return [Brle.ones(int(s) + 1) if m is None else m for s, m in zip(segment.slots, segment.masks, strict=True)]
    slots = segment_slots(segment, page_size)
    mask = windowed(segment, dense_mask(segment, page_size), window, page_size)
    rows = []
    for row in mask:
        bits = np.zeros(int(slots[-1]) + 1, dtype=bool)
        bits[slots[row]] = True
        rows.append(Brle.from_bool(bits))
    return rows
