"""The adapters of a server: each is a model name for clients. Loaded with the engine, or later by an admin key.

A path that a client names must lie below --lora-dir, with every link resolved; the files that are read, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from headway.base.errors import HeadwayError, InvalidInput
from headway.server.errors import ApiError, bad_request
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.models.adapters.adapter import Adapter
    from headway.models.adapters.source import AdapterSource
    from headway.program.engine import Engine


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """An adapter under the name that clients use."""

    name: str
    adapter: Adapter
    scale: float
    loaded_at: int


class ServedAdapters:
    """The adapters of one server by name. Used on the event loop, except for `open`."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._served: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()  # one load at a time

    @property
    def names(self) -> Mapping[str, ServedAdapter]:
        return MappingProxyType(self._served)

    def open(self, engine: Engine) -> None:
        """Load the adapters that the server was started with."""
        settings = self._settings
        taken = {settings.public_name, settings.model, *settings.served_names}
        for source in settings.adapters:
            if source.name in self._served or source.name in taken:
                raise InvalidInput(f"two models are called {source.name!r}; give each adapter a name of its own")
            self._served[source.name] = self._loaded(engine, source)

    async def load(self, engine: Engine, name: str, path: str, *, taken: tuple[str, ...], replace: bool) -> None:
        """Load an adapter from below --lora-dir. Raises an `ApiError`, and nothing has changed then."""
        from headway.models.adapters.source import NAME, AdapterSource

        if not NAME.fullmatch(name):
            raise bad_request(f"lora_name is {name!r:.80}; it must be printable characters without spaces", "lora_name")
        async with self._changing:
            before = self._served.get(name)
            if name in taken or (before is not None and not replace):
                raise bad_request(
                    f"the name {name!r:.80} is taken; use another one, or unload it first", "lora_name", "name_taken"
                )
            if before is None and len(self._served) >= self._settings.max_loras:
                raise bad_request(
                    f"{len(self._served)} adapters are loaded and max_loras is {self._settings.max_loras}; unload one",
                    "lora_name",
                    "too_many",
                )
            source = AdapterSource(name, self.allowed_path(path))
            try:
                self._served[name] = await asyncio.to_thread(self._loaded, engine, source)
            except HeadwayError as error:
                text = str(error).replace(str(self._root()), "")
                raise bad_request(f"the adapter cannot be loaded: {text}", "lora_path", "invalid_adapter") from error
            if before is not None:
                self._let_go(engine, before)

    async def unload(self, engine: Engine, name: str) -> None:
        """Forget an adapter; requests that use it go on."""
        async with self._changing:
            served = self._served.pop(name, None)
            if served is None:
                raise ApiError(404, f"there is no adapter {name!r:.80}", param="lora_name", code="adapter_not_found")
            self._let_go(engine, served)

    def allowed_path(self, path: str) -> Path:
        """A path below --lora-dir, with links resolved; raises for any other, and does not say what is there."""
        root = real = self._root()
        try:
            real = (root / path).resolve()
            files = [real] if not real.is_dir() else [real / "adapter_config.json", real / "adapter_model.safetensors"]
            inside = real != root and all(file.resolve().is_relative_to(root) for file in (real, *files))
            there = real.exists()
        except (OSError, ValueError, RuntimeError):  # a loop of links, a null byte, a name that is too long
            inside = there = False
        if not inside or not there:
            raise bad_request(
                f"lora_path is {path!r:.200}; it must be a folder or a .gguf file below the server's --lora-dir",
                "lora_path",
                "path_not_allowed",
            )
        return real

    def _root(self) -> Path:
        assert self._settings.lora_dir is not None
        return self._settings.lora_dir.resolve()

    def _loaded(self, engine: Engine, source: AdapterSource) -> ServedAdapter:
        from headway.models.adapters.adapter import Adapter

        settings = self._settings
        adapter = Adapter.load(source.path, max_rank=settings.max_lora_rank, max_bytes=settings.max_lora_bytes)
        engine.load_adapter(adapter)
        return ServedAdapter(source.name, adapter, source.scale, int(time.time()))

    def _let_go(self, engine: Engine, served: ServedAdapter) -> None:
        if all(other.adapter.digest != served.adapter.digest for other in self._served.values()):
            engine.unload_adapter(served.adapter)
