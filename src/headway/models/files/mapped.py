"""Memory-mapped model files, and the bytes of one tensor in them.

Owns mapping and unmapping, and a file's identity. It never reads a file whole, never writes one, and does not know what
the bytes mean.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import stat
import sys
from pathlib import Path

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, HeadwayError, ModelNotFound
from headway.base.text import short_repr

_NORESERVE = 0x4000  # Linux's MAP_NORESERVE on these machines; Python 3.11 has no name for it


@dataclass(frozen=True, eq=False, slots=True)
class Span:
    """`nbytes` bytes at `offset` in the map of a file."""

    data: mmap.mmap
    offset: int
    nbytes: int

    def bytes(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The bytes from `start` to `stop`, uint8: a view of the map."""
        return np.frombuffer(self.data, np.uint8, (self.nbytes if stop is None else stop) - start, self.offset + start)

    def forget(self, start: int, stop: int) -> None:
        """Release the memory of bytes that were read and never written; the next access reads the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = (self.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, first, self.offset + stop - first)


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file privately: reads share the page cache, a write would change only this process's copy."""
    return identified_map(path)[0]


def identified_map(path: Path) -> tuple[mmap.mmap, tuple[int, ...]]:
    """The map of a file, and an identity that differs for other files and after a change."""
    try:
        mode = os.stat(path).st_mode
        # Checked before opening, because opening a named pipe waits for a writer.
        if not stat.S_ISREG(mode):
            raise BadModelFile(f"{path} is not a regular file; pass the path of a model file")
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if info.st_size == 0:
                raise BadModelFile(f"{path} is empty (0 bytes); download or convert it again")
            identity = info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
            return _map(file.fileno()), identity
    except FileNotFoundError:
        raise ModelNotFound(f"there is no file {path}; check the path") from None
    except HeadwayError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path that no file system could have
        reason = getattr(error, "strerror", None) or error
        raise BadModelFile(f"{short_repr(str(path))} cannot be read: {reason}") from None


def unmap(data: mmap.mmap) -> None:
    """Close a map now, or with its last view: arrays and tensors that view it keep it open."""
    with contextlib.suppress(BufferError):
        data.close()


def _map(fd: int) -> mmap.mmap:
    # A private writable map counts as committed memory: without NORESERVE a file larger than RAM would be refused.
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
