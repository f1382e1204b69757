"""A model file in memory: its private map, and the bytes of one tensor in it.

Owns how a file is mapped and let go of, and what tells it from others. It never reads a file whole, never writes one,
and knows nothing of what the bytes mean.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.base.errors import BadModelFile, HeadwayError, ModelNotFound
from headway.base.text import short_repr

_NORESERVE = 0x4000  # Linux's MAP_NORESERVE on these machines; Python 3.11 has no name for it


@dataclass(frozen=True, eq=False, slots=True)
class Span:
    """`nbytes` bytes from `offset` on in the map of a file."""

    data: mmap.mmap
    offset: int
    nbytes: int

    def bytes(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Those from `start` to `stop`, uint8: a view of the map."""
        return np.frombuffer(self.data, np.uint8, (self.nbytes if stop is None else stop) - start, self.offset + start)

    def forget(self, start: int, stop: int) -> None:
        """Let go of the memory behind bytes that were read and never written; another look reads the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = (self.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, first, self.offset + stop - first)


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file privately: reads share the page cache, a write would change only this process's copy."""
    return identified_map(path)[0]


def identified_map(path: Path) -> tuple[mmap.mmap, tuple[int, ...]]:
    """The map of a file, and what tells it from others and from itself after a change."""
    try:
        mode = os.stat(path).st_mode
        # Looked at before opening, because opening a named pipe waits for a writer.
        if not stat.S_ISREG(mode):
            raise BadModelFile(f"{path} is not a regular file; pass the path of a model file")
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size == 0:
                raise BadModelFile(f"{path} is empty (0 bytes); download or convert it again")
            identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
            return _map(file.fileno()), identity
    except FileNotFoundError:
        raise ModelNotFound(f"there is no file {path}; check the path") from None
    except HeadwayError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path that no file system could have
        reason = getattr(error, "strerror", None) or error
        raise BadModelFile(f"{short_repr(str(path))} cannot be read: {reason}") from None


def unmap(data: mmap.mmap) -> None:
    """Close a map now, or leave it to its last view: arrays and tensors made from it hold it open."""
    with contextlib.suppress(BufferError):
        data.close()


def _map(fd: int) -> mmap.mmap:
    # A private writable map counts as memory to come, so a file larger than RAM would be refused without NORESERVE.
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
