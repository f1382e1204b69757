"""Pages in files, below those in host memory: one file a page, named by scope and key.

The scope says what computed the pages (weights, page size, types): an engine only ever finds its own. A file has a
checksum over its name and its page; one that is damaged is deleted and counted. Only files with names like ours are
ever deleted. A thread of its own reads and writes: the engine's lock is never held for a disk, and no step waits.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from headway.base.errors import InvalidInput
from headway.base.system.log import log_event
from headway.base.text import format_bytes
from headway.kv.tiers.page_store import averaged

MAGIC = b"headway-page-1\n\n"
DIGEST = 32
HEADER = len(MAGIC) + DIGEST
NAME = re.compile(r"[0-9a-f]{128}\.page")
READ_ONLY = os.O_RDONLY | (os.O_BINARY if sys.platform == "win32" else os.O_NOFOLLOW)
WAITING = 256 << 20  # bytes that may wait to be written; what comes while there are as many is dropped
Fetched = Callable[[dict[bytes, bytes]], None]


class PageFolder:
    """Files of one page each, at most `limit` bytes of them; the least recently used go first."""

    def __init__(self, folder: Path, limit: int, page_bytes: int, scope: bytes) -> None:
        self._folder, self._limit, self._page_bytes, self._scope = folder, limit, page_bytes, scope
        self._changed = threading.Condition()
        self._files: OrderedDict[str, int] = OrderedDict()  # sizes, least recently used first; of other scopes too
        self._writes: deque[tuple[str, bytes]] = deque()
        self._reads: deque[tuple[Sequence[bytes], bytes, Fetched]] = deque()
        self._gone: deque[str] = deque()  # files to be deleted
        self._waiting = 0  # bytes to be written
        self._writing = ""  # the file that is written now, unless it was cleared meanwhile
        self._closing = False
        self.bytes = self.pages = 0  # of all files, and how many there are
        self.errors = self.damaged = self.dropped = self.written = 0
        self.page_seconds: float | None = None  # that reading one takes
        _check_folder(folder)
        self._scan()
        self._thread = threading.Thread(target=self._work, name="headway-page-folder", daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether there is a file of this key."""
        return self._name(key, self._scope) in self._files

    def keep(self, key: bytes, page: bytes) -> None:
        """Have a page written, soon."""
        name = self._name(key, self._scope)
        with self._changed:
            if name in self._files:
                self._files.move_to_end(name)
            elif self._closing or self._waiting + len(page) > WAITING:
                self.dropped += 1
            else:
                self._waiting += len(page)
                self._writes.append((name, page))
                self._changed.notify()

    def fetch(self, keys: Sequence[bytes], done: Fetched) -> None:
        """Have pages read. `done` gets those that are whole, on the folder's thread."""
        with self._changed:
            self._reads.append((keys, self._scope, done))
            self._changed.notify()

    def use_scope(self, scope: bytes) -> None:
        """What computes pages from now on. Pages of other scopes go as they are not used."""
        with self._changed:
            self._scope = scope

    def clear(self) -> None:
        """Delete the files of this scope."""
        with self._changed:
            self._waiting -= sum(len(page) for _, page in self._writes)
            self._writes.clear()
            if self._writing.startswith(self._scope.hex()):
                self._writing = ""
            for name in [name for name in self._files if name.startswith(self._scope.hex())]:
                self._drop(name)
                self._gone.append(name)
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._gone or self._reads or self._writes or self._closing):
                    self._changed.wait()
                while self._gone:
                    self._delete(self._gone.popleft())
                if self._reads:
                    read, write = self._reads.popleft(), None
                elif self._writes:
                    read, write = None, self._writes.popleft()
                    self._writing = write[0]
                elif self._closing:
                    return
                else:
                    continue
            if read is not None:
                keys, scope, done = read
                done(self._read_all(keys, scope))
            elif write is not None:
                self._write(*write)

    def _read_all(self, keys: Iterable[bytes], scope: bytes) -> dict[bytes, bytes]:
        """The pages that are whole, up to the first one that is not: those after it are of no use."""
        pages: dict[bytes, bytes] = {}
        for key in keys:
            began = time.perf_counter()
            page = self._read(self._name(key, scope))
            if page is None:
                break
            self.page_seconds = averaged(self.page_seconds, time.perf_counter() - began)
            pages[key] = page
        return pages

    def _read(self, name: str) -> bytes | None:
        path = self._folder / name
        try:
            descriptor = os.open(path, READ_ONLY)
            with os.fdopen(descriptor, "rb") as file:
                own = _is_own(os.fstat(file.fileno()))
                data = file.read(HEADER + self._page_bytes + 1) if own else b""
            with suppress(OSError):
                os.utime(path)  # for the order in which whoever comes next deletes
        except FileNotFoundError:  # another engine has deleted it
            with self._changed:
                self._drop(name)
            return None
        except OSError as error:
            self._failed("read", error)
            with self._changed:
                self._drop(name)
            return None
        page = memoryview(data)[HEADER:]
        if len(page) != self._page_bytes or data[:HEADER] != _header(name, page):
            with self._changed:
                self.damaged += 1
                self._delete(name)
            return None
        with self._changed:
            if name in self._files:
                self._files.move_to_end(name)
        return bytes(page)

    def _write(self, name: str, page: bytes) -> None:
        """A file that appears whole or not at all."""
        size = HEADER + len(page)
        with self._changed:
            self._waiting -= len(page)
            while self._files and self.bytes + size > self._limit:
                self._delete(next(iter(self._files)))
        try:
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=".page-part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_header(name, memoryview(page)))
                    file.write(page)
                os.replace(temporary, self._folder / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            self._failed("written to", error)
            return
        with self._changed:
            if self._writing == name:
                self._add(name, size)
                self.written += 1
            else:
                self._gone.append(name)

    def _failed(self, verb: str, error: OSError) -> None:
        if not self.errors:
            log_event(f"pages could not be {verb} {self._folder}; they are computed again", why=str(error))
        self.errors += 1

    # -- the files that there are, under their own lock ---------------------------------------------------------------

    def _scan(self) -> None:
        """The files of engines before, the least recently used first."""
        found = []
        for entry in os.scandir(self._folder):
            if not NAME.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, entry.name, status.st_size))
        for _, name, size in sorted(found):
            self._add(name, size)
        while self.bytes > self._limit:
            self._delete(next(iter(self._files)))

    def _add(self, name: str, size: int) -> None:
        self._drop(name)
        self._files[name] = size
        self.bytes += size
        self.pages = len(self._files)

    def _drop(self, name: str) -> None:
        """A file is not there."""
        self.bytes -= self._files.pop(name, 0)
        self.pages = len(self._files)

    def _delete(self, name: str) -> None:
        self._drop(name)
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._failed("deleted from", error)

    @staticmethod
    def _name(key: bytes, scope: bytes) -> str:
        return f"{scope.hex()}{key.hex()}.page"


def _header(name: str, page: memoryview) -> bytes:
    digest = blake2b(name.encode(), digest_size=DIGEST, person=b"headway-file")
    digest.update(page)
    return MAGIC + digest.digest()


def _is_own(status: os.stat_result) -> bool:
    """Whether a file, or a folder, is the user's own, and nobody else can write to it."""
    if sys.platform == "win32":
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _check_folder(folder: Path) -> None:
    """Have a folder that nobody else can write to: whoever can changes what models answer."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        os.listdir(folder)
    except OSError as error:
        raise InvalidInput(
            f"cache_folder {str(folder)!r} cannot be used: {error.strerror or error}; give another folder"
        ) from error
    if not _is_own(status):
        raise InvalidInput(
            f"cache_folder {str(folder)!r} belongs to another user, or others can write to it; give one of your own "
            "that only you can write to (chmod 700)"
        )


def check_limit(limit: int, page_bytes: int) -> None:
    """Refuse a folder that holds no page."""
    if limit < page_bytes + HEADER:
        raise InvalidInput(
            f"cache_folder_size is {format_bytes(limit)} and a page takes {format_bytes(page_bytes + HEADER)}; give a "
            "larger one"
        )
