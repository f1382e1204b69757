"""The best of a row as `torch.topk` orders them on the CPU, exact ties included, without torch.

Beam search is compared with transformers, which takes what topk gives; where scores tie, and at a search's ends many
do, the choice is that of the algorithms below: partial_sort, nth_element and sort of the GNU C++ library, on pairs of a
score and its index that are compared by score alone. NaN is the largest.
"""

from __future__ import annotations

import math

import numpy as np

Item = tuple[float, int]
CHUNK = 4096  # scores that are compared at a time
SMALL = 16  # what sort leaves to a final insertion sort


def topk(scores: np.ndarray, k: int) -> np.ndarray:
    """The indices of the `k` largest of scores [N], largest first."""
    if k * 64 <= len(scores):
        items = _partial_sort(scores, k)
    else:
        items = list(zip(scores.tolist(), range(len(scores)), strict=True))
        _nth_element(items, k - 1)
        items = _sorted(items[: k - 1]) + items[k - 1 : k]
    return np.array([index for _, index in items], np.int64)


def _before(a: Item, b: Item) -> bool:
    return a[0] > b[0] or (math.isnan(a[0]) and not math.isnan(b[0]))


# -- partial_sort: a heap of the best so far, its worst on top ---------------------------------------------------------


def _partial_sort(scores: np.ndarray, k: int) -> list[Item]:
    heap: list[Item] = list(zip(scores[:k].tolist(), range(k), strict=True))
    for parent in range((k - 2) // 2, -1, -1):
        _adjust(heap, parent, k, heap[parent])
    for start in range(k, len(scores), CHUNK):
        part = scores[start : start + CHUNK]
        for i in np.flatnonzero((part > heap[0][0]) | np.isnan(part)).tolist():
            item = (float(part[i]), start + i)
            if _before(item, heap[0]):
                _adjust(heap, 0, k, item)
    for last in range(k - 1, 0, -1):
        item, heap[last] = heap[last], heap[0]
        _adjust(heap, 0, last, item)
    return heap


def _adjust(heap: list[Item], hole: int, size: int, item: Item) -> None:
    """Move the hole down to a leaf, then the item up from there."""
    top, child = hole, hole
    while child < (size - 1) // 2:
        child = 2 * (child + 1)
        if _before(heap[child], heap[child - 1]):
            child -= 1
        heap[hole] = heap[child]
        hole = child
    if size % 2 == 0 and child == (size - 2) // 2:
        child = 2 * (child + 1)
        heap[hole] = heap[child - 1]
        hole = child - 1
    parent = (hole - 1) // 2
    while hole > top and _before(heap[parent], item):
        heap[hole] = heap[parent]
        hole, parent = parent, (parent - 1) // 2
    heap[hole] = item


# -- nth_element and sort: partitions around the median of three -------------------------------------------------------


def _nth_element(items: list[Item], nth: int) -> None:
    first, last = 0, len(items)
    depth = 2 * (len(items).bit_length() - 1)
    while last - first > 3:
        if depth == 0:
            _heap_select(items, first, nth + 1, last)
            items[first], items[nth] = items[nth], items[first]
            return
        depth -= 1
        cut = _partition(items, first, last)
        if cut <= nth:
            first = cut
        else:
            last = cut
    _insertion_sort(items, first, last)


def _sorted(items: list[Item]) -> list[Item]:
    if items:
        _sort_loop(items, 0, len(items), 2 * (len(items).bit_length() - 1))
        _insertion_sort(items, 0, len(items))
    return items


def _sort_loop(items: list[Item], first: int, last: int, depth: int) -> None:
    while last - first > SMALL:
        if depth == 0:
            _heap_select(items, first, last, last)
            part = items[first:last]
            for end in range(len(part) - 1, 0, -1):
                item, part[end] = part[end], part[0]
                _adjust(part, 0, end, item)
            items[first:last] = part
            return
        depth -= 1
        cut = _partition(items, first, last)
        _sort_loop(items, cut, last, depth)
        last = cut


def _heap_select(items: list[Item], first: int, middle: int, last: int) -> None:
    heap, size = items[first:middle], middle - first
    for parent in range((size - 2) // 2, -1, -1):
        _adjust(heap, parent, size, heap[parent])
    for i in range(middle, last):
        if _before(items[i], heap[0]):
            item, items[i] = items[i], heap[0]
            _adjust(heap, 0, size, item)
    items[first:middle] = heap


def _partition(items: list[Item], first: int, last: int) -> int:
    """Put the median of three at `first` and divide the rest around it; returns where the second part begins."""
    a, b, c = first + 1, first + (last - first) // 2, last - 1
    if _before(items[a], items[b]):
        median = b if _before(items[b], items[c]) else (c if _before(items[a], items[c]) else a)
    else:
        median = a if _before(items[a], items[c]) else (c if _before(items[b], items[c]) else b)
    items[first], items[median] = items[median], items[first]
    pivot, low, high = items[first], first + 1, last
    while True:
        while _before(items[low], pivot):
            low += 1
        high -= 1
        while _before(pivot, items[high]):
            high -= 1
        if low >= high:
            return low
        items[low], items[high] = items[high], items[low]
        low += 1


def _insertion_sort(items: list[Item], first: int, last: int) -> None:
    for i in range(first + 1, last):
        item, at = items[i], i
        while at > first and _before(item, items[at - 1]):
            items[at] = items[at - 1]
            at -= 1
        items[at] = item
