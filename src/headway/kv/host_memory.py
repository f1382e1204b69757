"""Host memory that is taken when it is first written, and can be given back to the system."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence

SYSTEM_PAGE = mmap.PAGESIZE


def lazy_zeros(size: int) -> mmap.mmap | bytearray:
    """Zeros of which only what is written takes memory; to allocate them elsewhere would touch all of them at once."""
    if sys.platform == "win32":
        return bytearray(size)
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {size} bytes: {error.strerror}") from error


def give_back(memory: mmap.mmap | bytearray, start: int, end: int) -> None:
    """Give the system's pages that lie wholly in bytes [start, end) back, on Linux; they read as zeros afterwards."""
    first, last = -(-start // SYSTEM_PAGE) * SYSTEM_PAGE, end // SYSTEM_PAGE * SYSTEM_PAGE
    if isinstance(memory, mmap.mmap) and sys.platform == "linux" and first < last:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def give_back_pages(memory: mmap.mmap | bytearray, shape: Sequence[int], width: int, pages: Sequence[int]) -> None:
    """Give pages back that lie in memory as [layers, 2, pages, numbers of `width` bytes]."""
    layers, two, total, numbers = shape
    size = numbers * width
    for first, end in runs(pages):
        for plane in range(layers * two):
            at = plane * total * size
            give_back(memory, at + first * size, at + end * size)


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as half-open ranges."""
    first = end = None
    for number in numbers:
        if number != end:
            if first is not None and end is not None:
                yield first, end
            first = number
        end = number + 1
    if first is not None and end is not None:
        yield first, end
