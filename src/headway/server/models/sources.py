"""What a server may load: models that were named, and those of a folder. Nothing is opened here but headers.

A client's name is only ever looked up among these names; it never becomes a path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidInput, ModelError
from headway.models.adapters.source import AdapterSource
from headway.server import logs
from headway.server.settings import NAME, ServerSettings

if TYPE_CHECKING:
    from headway.models.weights.load import LoadProgress
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter

LISTING_SECONDS = 1.0  # a folder is listed at most this often
Stamp = tuple[tuple[str, int, int], ...]  # names, sizes and times of files
OpenModel = Callable[[int | None, "LoadProgress"], "Engine"]  # with the bytes that it may take


@dataclass(frozen=True)
class ModelSizes:
    """What a model's headers say: bytes of weights, positions of its context, values of keys for each, and more."""

    weight_bytes: int
    context_length: int
    kv_values_per_token: int
    parameters: int
    family: str


def unknown_sizes() -> ModelSizes | None:
    """For models that are not on this disk yet, or in memory already."""
    return None


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model that may be loaded. Responses carry the first of its `names`; `accepted` names are not listed."""

    names: tuple[str, ...]
    open: OpenModel  # in a thread
    read_sizes: Callable[[], ModelSizes | None] = unknown_sizes  # in a thread
    accepted: tuple[str, ...] = ()
    adapters: tuple[AdapterSource, ...] = ()
    open_drafter: Callable[[], Drafter] | None = None
    is_kept: bool = False  # loaded at the start, and never unloaded
    path: Path | None = None  # what errors must not tell

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def sizes(self) -> ModelSizes | None:
        """What its headers say; None if they cannot be read, which may change."""
        try:
            return self._read_sizes
        except (HeadwayError, OSError):
            return None

    @cached_property
    def _read_sizes(self) -> ModelSizes | None:
        return self.read_sizes()


@dataclass(frozen=True, eq=False)
class ModelSources:
    """All that one server may load, and the memory that they share."""

    named: tuple[ModelSource, ...]
    folder: ModelFolder | None = None
    budget: int | None = None  # bytes of all models together
    pages: int | None = None  # of each KV cache, where that was given

    @classmethod
    def single(
        cls, settings: ServerSettings, open_engine: Callable[[], Engine], open_drafter: Callable[[], Drafter] | None
    ) -> ModelSources:
        """One model, which stays."""
        source = ModelSource(
            settings.served_names or (settings.public_name,),
            lambda memory, progress: open_engine(),
            accepted=(settings.model,),
            adapters=settings.adapters,
            open_drafter=open_drafter,
            is_kept=True,
        )
        return cls((source,))

    def __post_init__(self) -> None:
        taken: set[str] = set()
        for source in self.named:
            own = {*source.names, *source.accepted}
            for name in (*own, *(one.name for one in source.adapters)):
                if name in taken:
                    raise InvalidInput(f"two models are called {name!r}; give each a name of its own, as in NAME=MODEL")
                taken.add(name)
        if not self.named and self.folder is None:
            raise InvalidInput("a server needs a model; pass --model MODEL or --models-dir FOLDER")

    @property
    def is_single(self) -> bool:
        return self.folder is None and len(self.named) == 1


class ModelFolder:
    """The models of a folder: its subfolders with a config.json, and its .gguf files. Listed again as it changes."""

    def __init__(
        self,
        root: Path,
        open: Callable[[Path], OpenModel],
        *,
        limit: int,
        keep: Sequence[str] = (),
        adapters: Mapping[str, tuple[AdapterSource, ...]] = MappingProxyType({}),
        open_drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        if not root.is_dir():
            raise InvalidInput(f"models_dir is {str(root)!r}; it must be a folder")
        self.root, self._open, self._limit, self._keep = root.resolve(), open, limit, frozenset(keep)
        self._adapters, self._open_drafter = adapters, open_drafter
        self._listed: dict[str, ModelSource] = {}
        self._stamps: dict[str, Stamp] = {}
        self._skipped: set[str] = set()  # entries that the log has mentioned
        self._read_at = -LISTING_SECONDS

    def sources(self) -> Mapping[str, ModelSource]:
        """The models by name, as they are now; in a thread. A source stays the same while its files do."""
        if time.monotonic() - self._read_at < LISTING_SECONDS:
            return self._listed
        sources: dict[str, ModelSource] = {}
        stamps: dict[str, Stamp] = {}
        for path in self._entries():
            name = path.name.removesuffix(".gguf") if path.suffix == ".gguf" else path.name
            if name in sources:
                self._skip(path, "another entry has this name")
            else:
                stamps[name] = _stamp(path)
                known = self._listed.get(name) if self._stamps.get(name) == stamps[name] else None
                sources[name] = known or self._source(name, path)
        self._listed, self._stamps, self._read_at = sources, stamps, time.monotonic()
        return sources

    def _entries(self) -> list[Path]:
        try:
            entries = sorted(self.root.iterdir())
        except OSError as error:
            logs.warn("the folder of models cannot be read", error=error.strerror or str(error))
            return []
        models = [path for path in entries if self._is_model(path)]
        for path in models[self._limit :]:
            self._skip(path, f"max_models is {self._limit}")
        return models[: self._limit]

    def _is_model(self, path: Path) -> bool:
        if path.name.startswith(".") or not looks_like_model(path):
            return False
        if not NAME.fullmatch(path.name):
            return self._skip(path, "its name has spaces or other characters that names of models cannot have")
        if not is_inside(path, self.root):
            return self._skip(path, "a link leads out of the folder")
        return True

    def _skip(self, path: Path, why: str) -> bool:
        if path.name not in self._skipped:
            self._skipped.add(path.name)
            logs.warn("an entry of the folder of models is not served", entry=path.name, reason=why)
        return False

    def _source(self, name: str, path: Path) -> ModelSource:
        opened = self._open(path)

        def open(memory: int | None, progress: LoadProgress) -> Engine:
            if not looks_like_model(path) or not is_inside(path, self.root):  # it may have changed
                raise ModelError(f"the model {name!r} is no longer in the folder of models")
            return opened(memory, progress)

        return ModelSource(
            (name,),
            open,
            lambda: read_sizes(path),
            adapters=self._adapters.get(name, ()),
            open_drafter=self._open_drafter,
            is_kept=name in self._keep,
            path=path,
        )


def looks_like_model(path: Path) -> bool:
    """Whether a path is a folder with a config.json, or a .gguf file."""
    try:
        return path.is_file() if path.suffix == ".gguf" else (path / "config.json").is_file()
    except OSError:  # a loop of links
        return False


def _stamp(path: Path) -> Stamp:
    """What changes when a model's files do."""
    try:
        files = [path] if path.is_file() else sorted(path.iterdir())
        return tuple((file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()])
    except OSError:  # it is being changed
        return ()


def is_inside(path: Path, root: Path) -> bool:
    """Whether a path and, for a folder, all of its files are below the root, with every link resolved."""
    try:
        files = [path] if path.is_file() else [path, *path.iterdir()]
        return all(file.resolve().is_relative_to(root) for file in files)
    except (OSError, RuntimeError):
        return False


def read_sizes(path: Path) -> ModelSizes:
    """The sizes of a model on disk, from its headers."""
    from headway.models.config import read_config
    from headway.models.files.weights import open_weights

    config = read_config(path)
    with open_weights(path) as weights:
        size = sum(weights.nbytes(name) for name in weights.names())
    return ModelSizes(size, config.max_positions, config.kv_values_per_token, config.parameters, config.family)
