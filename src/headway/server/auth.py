"""API keys: a file of hashes, who a key belongs to, and what that tenant may do.

A key is 256 random bits, shown once and stored as its SHA-256 (a slow hash protects words people choose, and there are
none here). Looking a key up compares against every stored hash in constant time.
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
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput

PREFIX = "hw-"
MAX_KEY = 512  # characters of what a client may present
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TenantLimits:
    """What one key may do at once and in a minute; None leaves it to the server's own limits."""

    max_requests: int | None = None  # admitted and not answered yet
    max_tokens: int | None = None  # prompt and answer of these, as asked for
    requests_per_minute: int | None = None
    max_priority: float | None = None  # the highest priority a request of this key may ask for

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "requests_per_minute"):
            value = getattr(self, name)
            if value is not None:
                check_integer(value, f"the limit {name}", 1)
        priority = self.max_priority
        if priority is None:
            return
        if isinstance(priority, bool) or not isinstance(priority, int | float) or not math.isfinite(priority):
            raise InvalidInput(f"the limit max_priority is {priority!r}; it takes a number")


@dataclass(frozen=True)
class Tenant:
    """Whom a request belongs to. Contexts of different salt share no cached page."""

    name: str
    salt: str
    limits: TenantLimits


@dataclass(frozen=True)
class _Key:
    sha256: str
    created: str
    tenant: Tenant


ANYONE = Tenant("anyone", "", TenantLimits())


class Keys:
    """The keys of one file, as it was when the server started."""

    def __init__(self, keys: tuple[_Key, ...]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The keys in a file that `add_key` writes; a file that is wrong in any way is refused."""
        try:
            mode = path.stat().st_mode
            entries = json.loads(path.read_text())["keys"]
            keys = tuple(_key(entry) for entry in entries)
        except FileNotFoundError:
            raise InvalidInput(
                f"there is no key file {str(path)!r}; `headway serve --keys {path} --new-key NAME` makes one"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"the key file {str(path)!r} cannot be used: {error}") from None
        if mode & 0o002:
            raise InvalidInput(f"anyone may write to the key file {str(path)!r}; chmod o-w it first")
        if not keys:
            raise InvalidInput(f"the key file {str(path)!r} has no keys; --new-key NAME adds one")
        names = [key.tenant.name for key in keys]
        if len(set(names)) < len(names):
            raise InvalidInput(f"the key file {str(path)!r} has two keys of one name; rename or remove one")
        return cls(keys)

    def find(self, presented: str) -> Tenant | None:
        """Whom a key belongs to. Takes as long for a wrong key as for a right one."""
        digest = _digest(presented) if len(presented) <= MAX_KEY else ""
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key.tenant
        return found

    def __len__(self) -> int:
        return len(self._keys)


def add_key(path: Path, name: str, limits: TenantLimits = TenantLimits()) -> str:
    """Make a key, store its hash under a name, and return the key: this is the only time it is seen."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"key name {name!r} cannot be used; it takes 1 to 128 of A-Z a-z 0-9 . _ -")
    keys = Keys.read(path)._keys if path.exists() else ()
    if any(key.tenant.name == name for key in keys):
        raise InvalidInput(f"{str(path)!r} has a key named {name!r} already; choose another name, or remove that one")
    secret = PREFIX + secrets.token_urlsafe(32)
    digest = _digest(secret)
    made = _Key(digest, datetime.now(UTC).isoformat(timespec="seconds"), Tenant(name, _salt(digest), limits))
    _write(path, {"version": 1, "keys": [_entry(key) for key in (*keys, made)]})
    return secret


def bearer(value: str) -> str | None:
    """The key in an Authorization header, or None."""
    scheme, _, key = value.partition(" ")
    key = key.strip(" ")  # no other blank, such as U+00A0: a key has none
    return key if scheme.lower() == "bearer" and key else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _salt(digest: str) -> str:
    """A name for the tenant's share of the prefix cache; says nothing about the key."""
    return hashlib.sha256(f"headway cache salt {digest}".encode()).hexdigest()


def _key(entry: Mapping[str, Any]) -> _Key:
    known = {"name", "sha256", "created", "limits"}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise InvalidInput(f"a key has the field {unknown[0]!r}; it takes {', '.join(sorted(known))}")
    name, digest, limits = entry["name"], entry["sha256"], entry.get("limits", {})
    if not _NAME.fullmatch(name) or not _HASH.fullmatch(digest):
        raise InvalidInput(f"the key {name!r} needs a plain name and a SHA-256 in 64 hex digits")
    unknown = sorted(set(limits) - {field.name for field in fields(TenantLimits)})
    if unknown:
        raise InvalidInput(f"the key {name!r} has the limit {unknown[0]!r}, which is not known")
    return _Key(digest, str(entry.get("created", "")), Tenant(name, _salt(digest), TenantLimits(**limits)))


def _entry(key: _Key) -> dict[str, Any]:
    limits = {name: value for name, value in asdict(key.tenant.limits).items() if value is not None}
    return {"name": key.tenant.name, "sha256": key.sha256, "created": key.created, "limits": limits}


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replace the file in one go, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
    with os.fdopen(handle, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
    os.replace(name, path)
