"""The files of each key: uploads for batches, and what batches came to.

A file belongs to the key that made it; no other key can see, read or delete it. Each key has at most `max_files` of
`max_file_bytes` together, and each file goes after `file_seconds`. On disk a file has its id as its name, in a folder
that only this user can read and that goes with the server. Used only on the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from dataclasses import field
from pathlib import Path
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.text import format_bytes, short_repr
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.settings import ServerSettings

MAX_NAME = 255  # characters


@dataclass(eq=False)
class StoredFile:
    """One file: what clients get of it, and where it is."""

    id: str
    name: str
    purpose: str
    size: int
    created_at: int
    expires_at: int
    path: Path
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """The files of one server, by key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._kept: dict[str, dict[str, StoredFile]] = {}  # by the key's name, oldest first
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """Where files are, made when it is first needed."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="headway-files-"))  # mode 0700
        return self._folder

    def all(self, tenant: Tenant) -> list[StoredFile]:
        """The files of this key, oldest first."""
        return list(self._kept.get(tenant.name, {}).values())

    def get(self, tenant: Tenant, id: str, param: str = "file_id") -> StoredFile:
        """A file of this key; raises a 404 for any other id, and does not say whether it is somebody else's."""
        stored = self._kept.get(tenant.name, {}).get(id)
        if stored is None:
            raise ApiError(
                404,
                f"there is no file {short_repr(id)}; it never was, or was deleted, or its time is over",
                param=param,
                code="file_not_found",
            )
        return stored

    def check_room(self, tenant: Tenant, size: int) -> None:
        """Raise if this key may not keep another file of this size."""
        most, own = self._settings, self.all(tenant)
        held = sum(one.size for one in own)
        if len(own) >= most.max_files or held + size > most.max_file_bytes:
            raise bad_request(
                f"this key has {len(own)} files of {format_bytes(held)}, and this one of {format_bytes(size)} exceeds "
                f"max_files {most.max_files} or max_file_bytes {most.max_file_bytes}; delete some",
                "file",
                "too_many_files",
            )

    def new_path(self) -> Path:
        """Where a file may be written that is then added."""
        return self.folder / f"new-{secrets.token_hex(12)}"

    def add(
        self, tenant: Tenant, name: str, purpose: str, *, data: bytes | None = None, path: Path | None = None,
        seconds: float | None = None,
    ) -> StoredFile:  # fmt: skip
        """Keep these bytes, or the file at this path, which is moved."""
        id, now = f"file-{secrets.token_hex(12)}", time.time()
        place, seconds = self.folder / id, seconds or self._settings.file_seconds
        if path is not None:
            path.rename(place)
        else:
            place.write_bytes(data or b"")
        stored = StoredFile(id, name, purpose, place.stat().st_size, int(now), int(now + seconds), place)
        stored.timer = asyncio.get_running_loop().call_later(seconds, self._drop, tenant.name, id)
        self._kept.setdefault(tenant.name, {})[id] = stored
        return stored

    def delete(self, tenant: Tenant, id: str) -> None:
        self.get(tenant, id)
        self._drop(tenant.name, id)

    def close(self) -> None:
        """Remove everything."""
        for name, own in list(self._kept.items()):
            for id in list(own):
                self._drop(name, id)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _drop(self, name: str, id: str) -> None:
        stored = self._kept.get(name, {}).pop(id, None)
        if not self._kept.get(name):
            self._kept.pop(name, None)
        if stored is None:
            return
        if stored.timer is not None:
            stored.timer.cancel()
        stored.path.unlink(missing_ok=True)  # who reads it or computes its rows has it open
