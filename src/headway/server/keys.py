"""API keys: a file of hashes, the tenant each key belongs to, and what that tenant may do.

A key is 256 random bits, shown once and stored as its SHA-256 (a slow hash protects passwords that people choose; these
are random). Looking a key up compares it with every stored hash in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput

PREFIX = "hw-"
MAX_KEY_CHARS = 512
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TenantLimits:
    """What one key may do at a time and per minute; None means only the server's own limits apply."""

    max_requests: int | None = None  # admitted and not finished
    max_tokens: int | None = None  # their prompts plus max_tokens
    requests_per_minute: int | None = None
    max_priority: float | None = None  # the highest priority its requests may have
    max_programs: int | None = None  # uploaded programs that run
    program_cpu: int | None = None  # seconds of CPU time of its programs within an hour

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "requests_per_minute", "max_programs", "program_cpu"):
            value = getattr(self, name)
            if value is not None:
                check_integer(value, f"the limit {name}", 1)
        priority = self.max_priority
        if priority is None:
            return
        if isinstance(priority, bool) or not isinstance(priority, int | float) or not math.isfinite(priority):
            raise InvalidInput(f"the limit max_priority is {priority!r}; it must be a finite number")


@dataclass(frozen=True)
class Tenant:
    """Who a request belongs to. Contexts with different salts share no cached pages."""

    name: str
    salt: str
    limits: TenantLimits
    admin: bool = False  # may load and unload adapters


@dataclass(frozen=True)
class _Key:
    sha256: str
    created: str
    tenant: Tenant


ANYONE = Tenant("anyone", "", TenantLimits())


class ApiKeys:
    """The keys of one file, as they were when the server started."""

    def __init__(self, keys: tuple[_Key, ...]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """The keys in a file written by `add_key`; a file with any error is rejected."""
        try:
            mode = path.stat().st_mode
            entries = json.loads(path.read_text())["keys"]
            keys = tuple(_key(entry) for entry in entries)
        except FileNotFoundError:
            raise InvalidInput(
                f"there is no key file {str(path)!r}; `headway serve --keys {path} --new-key NAME` creates one"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"the key file {str(path)!r} is not valid: {error}") from None
        if mode & 0o002:
            raise InvalidInput(f"the key file {str(path)!r} is world-writable; run chmod o-w on it first")
        if not keys:
            raise InvalidInput(f"the key file {str(path)!r} has no keys; --new-key NAME adds one")
        names = [key.tenant.name for key in keys]
        if len(set(names)) < len(names):
            raise InvalidInput(f"the key file {str(path)!r} has two keys with the same name; rename or remove one")
        return cls(keys)

    def find(self, key: str) -> Tenant | None:
        """The tenant a key belongs to, or None. Takes as long for a wrong key as for a right one."""
        digest = _digest(key) if len(key) <= MAX_KEY_CHARS else ""
        tenant = None
        for stored in self._keys:
            if hmac.compare_digest(stored.sha256, digest):
                tenant = stored.tenant
        return tenant

    def __len__(self) -> int:
        return len(self._keys)


def add_key(path: Path, name: str, limits: TenantLimits = TenantLimits(), *, admin: bool = False) -> str:
    """Create a key, store its hash under a name, and return the key, which is not stored anywhere.

    An `admin` key may load and unload adapters.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"the key name {name!r} is not valid; use 1 to 128 of A-Z a-z 0-9 . _ -")
    keys = ApiKeys.read(path)._keys if path.exists() else ()
    if any(key.tenant.name == name for key in keys):
        raise InvalidInput(f"{str(path)!r} already has a key named {name!r}; choose another name, or remove that key")
    secret = PREFIX + secrets.token_urlsafe(32)
    digest = _digest(secret)
    new = _Key(digest, datetime.now(UTC).isoformat(timespec="seconds"), Tenant(name, _salt(digest), limits, admin))
    _write(path, {"version": 1, "keys": [_entry(key) for key in (*keys, new)]})
    return secret


def bearer_key(value: str) -> str | None:
    """The key in an Authorization header, or None."""
    scheme, _, key = value.partition(" ")
    key = key.strip(" ")  # only spaces, not U+00A0 and the like
    return key if scheme.lower() == "bearer" and key else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _salt(digest: str) -> str:
    """The tenant's salt for the prefix cache; reveals nothing about the key."""
    return hashlib.sha256(f"headway cache salt {digest}".encode()).hexdigest()


def _key(entry: Mapping[str, Any]) -> _Key:
    known = {"name", "sha256", "created", "limits", "admin"}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise InvalidInput(f"a key has the unknown field {unknown[0]!r}; the fields are {', '.join(sorted(known))}")
    name, digest, limits = entry["name"], entry["sha256"], entry.get("limits", {})
    if not _NAME.fullmatch(name) or not _HASH.fullmatch(digest):
        raise InvalidInput(f"the key {name!r} needs a name of A-Z a-z 0-9 . _ - and a SHA-256 of 64 hex digits")
    unknown = sorted(set(limits) - {field.name for field in fields(TenantLimits)})
    if unknown:
        raise InvalidInput(f"the key {name!r} has the unknown limit {unknown[0]!r}")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise InvalidInput(f"the key {name!r} has admin={admin!r}; it must be true or false")
    return _Key(digest, str(entry.get("created", "")), Tenant(name, _salt(digest), TenantLimits(**limits), admin))


def _entry(key: _Key) -> dict[str, Any]:
    limits = {name: value for name, value in asdict(key.tenant.limits).items() if value is not None}
    entry = {"name": key.tenant.name, "sha256": key.sha256, "created": key.created, "limits": limits}
    return entry | ({"admin": True} if key.tenant.admin else {})


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replace the file atomically, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
    with os.fdopen(handle, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
    os.replace(name, path)
