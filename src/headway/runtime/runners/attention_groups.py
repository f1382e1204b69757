"""From a batch's segments to attention groups: dense masks, pages side by side. One plan a window, shared by layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.kernels.host.attention import AttentionGroup, Window, is_near
from headway.runtime.batch import Batch, Segment


def plan(batch: Batch, windows: set[Window], page_size: int) -> dict[Window, list[AttentionGroup]]:
    """Attention groups for every window that occurs in the model."""
    base = [dense_mask(s, page_size) for s in batch.segments]
    plans = {}
    for window in windows:
        masks = [windowed(s, m, window, page_size) for s, m in zip(batch.segments, base, strict=True)]
        plans[window] = _groups(batch.segments, masks, page_size)
    return plans


def dense_mask(segment: Segment, page_size: int) -> np.ndarray:
    """What each row attends to among the segment's pages: [R, P * page] bool."""
    slots = segment_slots(segment, page_size)
    mask = slots[None, :] <= segment.slots[:, None]
    for i, runs in enumerate(segment.masks):
        if runs is not None:
            bits = np.zeros(max(len(runs), int(slots[-1]) + 1), dtype=bool)
            bits[: len(runs)] = runs.to_bool()
            mask[i] = bits[slots]
    return mask


def windowed(segment: Segment, mask: np.ndarray, window: Window, page_size: int) -> np.ndarray:
    """The mask without slots that lie outside of the row's window, by position id."""
    if window is None:
        return mask
    known = segment.slot_positions
    slots = segment_slots(segment, page_size)
    positions = known[np.minimum(slots, len(known) - 1)]
    rows = known[segment.slots]
    return mask & is_near(window, rows[:, None], positions[None, :])


def segment_slots(segment: Segment, page_size: int) -> np.ndarray:
    """The sequence's slot at each column of the segment's mask."""
    return (segment.numbers[:, None] * page_size + np.arange(page_size)).ravel()


def _groups(segments: Sequence[Segment], masks: list[np.ndarray], page_size: int) -> list[AttentionGroup]:
    """Single rows share a call with others of about their length; longer segments have their own."""
    groups, singles = [], {}
    for segment, mask in zip(segments, masks, strict=True):
        if len(segment.rows) == 0:
            continue
        if len(segment.rows) == 1:
            singles.setdefault(len(segment.pages).bit_length(), []).append((segment, mask))
        else:
            groups.append(_stack([(segment, mask)], page_size))
    groups += [_stack(members, page_size) for members in singles.values()]
    return groups


def _stack(members: list[tuple[Segment, np.ndarray]], page_size: int) -> AttentionGroup:
    wide = max(len(s.pages) for s, _ in members)
    n, m = len(members), len(members[0][0].rows)
    pages, numbers = np.zeros((n, wide), np.int64), np.full((n, wide), -1, np.int64)
    mask = np.zeros((n, m, wide * page_size), dtype=bool)
    for i, (segment, bits) in enumerate(members):
        pages[i, : len(segment.pages)] = segment.pages
        numbers[i, : len(segment.pages)] = segment.numbers
        mask[i, :, : bits.shape[1]] = bits
    rows = np.array([list(s.rows) for s, _ in members], dtype=np.int64)
    return AttentionGroup(rows, pages, numbers, mask)


def score_group(segment: Segment, row: int, window: Window, page_size: int) -> AttentionGroup:
    """The group of one row alone, for reading its attention."""
    mask = windowed(segment, dense_mask(segment, page_size), window, page_size)
    i = row - segment.rows.start
    arrays = (np.array([[row]]), segment.pages[None], segment.numbers[None], mask[None, i : i + 1])
    return AttentionGroup(*(np.ascontiguousarray(a) for a in arrays))
