"""The adapters of a model: each is a model name for clients. Loaded with the engine, or later by an admin key.

A path that a client names must lie below --lora-dir, with every link resolved; the files that are read, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.text import short_repr
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
    """The adapters of one model by name; they stay in host memory while it is not loaded. Used on the event loop,
    except for `open`."""

    def __init__(self, settings: ServerSettings, sources: Sequence[AdapterSource]) -> None:
        self._settings = settings
        self._unread = {source.name: source for source in sources}  # those that no engine has had yet
        self._served: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()  # one load at a time

    @property
    def names(self) -> Mapping[str, ServedAdapter]:
        """Those that were loaded; all of them while the model is."""
        return MappingProxyType(self._served)

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all, also before the model is loaded for the first time."""
        return tuple(dict.fromkeys((*self._served, *self._unread)))  # one that is being read may be in both

    def size(self, name: str) -> int | None:
        """The bytes of an adapter: in memory, or of its files before it is read."""
        if (served := self._served.get(name)) is not None:
            return served.adapter.nbytes
        return None if (source := self._unread.get(name)) is None else _bytes_on_disk(source.path)

    def open(self, engine: Engine) -> None:
        """Load all adapters for an engine that was just opened."""
        for served in list(self._served.values()):
            engine.load_adapter(served.adapter)
        for name, source in list(self._unread.items()):
            self._served[name] = served = self._loaded(engine, source)
            if self._unread.pop(name, None) is None:  # it was unloaded meanwhile
                self._served.pop(name, None)
                self._let_go(engine, served)

    async def load(self, engine: Engine, name: str, path: str, *, is_taken: bool, others: int, replace: bool) -> None:
        """Load an adapter from below --lora-dir; other models have `others`. Raises an `ApiError`, and nothing has
        changed then."""
        from headway.models.adapters.source import NAME, AdapterSource

        if not NAME.fullmatch(name):
            raise bad_request(
                f"lora_name is {short_repr(name)}; it must be printable characters without spaces", "lora_name"
            )
        async with self._changing:
            before = self._served.get(name)
            if is_taken or (before is not None and not replace):
                raise bad_request(
                    f"the name {short_repr(name)} is taken; use another one, or unload it first",
                    "lora_name",
                    "name_taken",
                )
            count = len(self._served) + others
            if before is None and count >= self._settings.max_loras:
                raise bad_request(
                    f"{count} adapters are loaded and max_loras is {self._settings.max_loras}; unload one",
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

    async def unload(self, engine: Engine | None, name: str) -> None:
        """Forget an adapter; requests that use it go on. There is no engine while the model is not loaded."""
        async with self._changing:
            served = self._served.pop(name, None)
            unread = self._unread.pop(name, None)
            if served is None and unread is None:
                raise ApiError(
                    404, f"there is no adapter {short_repr(name)}", param="lora_name", code="adapter_not_found"
                )
            if served is not None and engine is not None:
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
                f"lora_path is {short_repr(path, 200)}; it must be a folder or a .gguf file below the "
                "server's --lora-dir",
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
        if all(other.adapter.digest != served.adapter.digest for other in list(self._served.values())):
            engine.unload_adapter(served.adapter)


def _bytes_on_disk(path: Path) -> int | None:
    """Of an adapter's weights: a file, or one in a folder; None where there is none yet."""
    with suppress(OSError):
        return (path / "adapter_model.safetensors" if path.is_dir() else path).stat().st_size
    return None
