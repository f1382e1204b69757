"""Installed programs, by key and name: in memory, and in a folder where the server has one."""

from __future__ import annotations

import re
from pathlib import Path

from headway.base.text import short_repr
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.settings import ServerSettings

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def check_source(source: str, settings: ServerSettings) -> None:
    """Raise if a source is too long."""
    size = len(source.encode(errors="surrogatepass"))
    if size > settings.max_program_bytes:
        raise bad_request(f"the program has {size} bytes; max_program_bytes is {settings.max_program_bytes}", "source")


class InstalledPrograms:
    """The sources that keys have installed."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._sources: dict[str, dict[str, str]] = {}

    def of(self, tenant: Tenant) -> dict[str, str]:
        """The sources of a key by name."""
        if tenant.name not in self._sources:
            folder = self._folder(tenant)
            files = [] if folder is None or not folder.is_dir() else sorted(folder.glob("*.py"))
            self._sources[tenant.name] = {file.stem: file.read_text() for file in files}
        return self._sources[tenant.name]

    def find(self, tenant: Tenant, name: str) -> str:
        """A source; raises a 404."""
        if (source := self.of(tenant).get(name)) is None:
            raise ApiError(404, f"this key has no installed program {short_repr(name)}", code="program_not_found")
        return source

    def check(self, tenant: Tenant, name: str, source: str) -> None:
        """Raise unless a key may keep a source under a name."""
        if not NAME.fullmatch(name):
            raise bad_request(
                f"{short_repr(name)} is not a name for a program; use 1 to 64 of A-Z a-z 0-9 _ . -", "name"
            )
        own, settings = self.of(tenant), self._settings
        check_source(source, settings)
        if name not in own and len(own) >= settings.max_installed_programs:
            most = settings.max_installed_programs
            raise bad_request(f"this key has {len(own)} programs installed; max_installed_programs is {most}")

    def install(self, tenant: Tenant, name: str, source: str) -> None:
        """Keep a source under a name, instead of the one before."""
        self.check(tenant, name, source)
        if (folder := self._folder(tenant)) is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = folder / f"{name}.part"
            part.write_text(source)
            part.replace(folder / f"{name}.py")
        self.of(tenant)[name] = source

    def remove(self, tenant: Tenant, name: str) -> None:
        """Forget a source; raises a 404."""
        self.find(tenant, name)
        if (folder := self._folder(tenant)) is not None:
            (folder / f"{name}.py").unlink(missing_ok=True)
        del self.of(tenant)[name]

    def _folder(self, tenant: Tenant) -> Path | None:
        root = self._settings.program_dir
        return None if root is None else root / f"key-{tenant.name}"
