"""The models of `headway serve`: one that stays, or several that share the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.cli.flags.shared import ComputeOptions, named_drafter
from headway.cli.terminal.render import fetched
from headway.models.adapters.source import AdapterSource
from headway.server.models import ModelFolder, ModelSource, ModelSources
from headway.server.models.memory import memory_budget
from headway.server.models.sources import ModelSizes, OpenModel, read_sizes
from headway.server.settings import NAME, ServerSettings, named_model

if TYPE_CHECKING:
    from headway.models.weights.load import LoadProgress
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter

OpenServed = Callable[..., "Engine"]  # of a path, with the options of `Engine`


@dataclass(frozen=True, eq=False)
class SeveralModels:
    """What was asked for: models by name, those of a folder, which of them stay, and their adapters."""

    named: tuple[tuple[str, str], ...]  # name, model
    folder: Path | None
    keep: tuple[str, ...]
    adapters: tuple[AdapterSource, ...]
    speculate: str | None

    @classmethod
    def of(
        cls,
        models: Sequence[str],
        folder: Path | None,
        keep: Sequence[str],
        adapters: Sequence[AdapterSource],
        speculate: str | None,
    ) -> SeveralModels:
        return cls(tuple(map(named_model, models)), folder, tuple(keep), tuple(adapters), speculate)

    def sources(
        self, settings: ServerSettings, options: ComputeOptions, sizes: dict[str, Any], open_served: OpenServed
    ) -> ModelSources:
        """All of them, with the memory that they share. Nothing is loaded; a model that is nowhere is refused now."""
        for _, model in self.named:
            _check_model(model)
        given = options.given()
        memory = {name: given.pop(name, None) for name in ("memory", "memory_fraction")}
        budget = memory_budget(options.device, **memory)

        def opener(find: Callable[[], Path]) -> OpenModel:
            def open(memory: int | None, progress: LoadProgress) -> Engine:
                return open_served(find(), progress=progress, memory=memory, **given, **sizes)

            return open

        owners, drafter = self._owners(), self._drafter()
        names, models = zip(*self.named, strict=True) if self.named else ((), ())
        named = tuple(
            ModelSource(
                (name,),
                opener(lambda model=model: fetched(model)),
                lambda model=model: _sizes_on_disk(model),
                accepted=() if model in names or models.count(model) > 1 else (model,),
                adapters=owners.pop(name, ()),
                open_drafter=drafter,
                is_kept=name in self.keep,
                path=Path(model).expanduser(),
            )
            for name, model in self.named
        )
        folder = None
        if self.folder is not None:
            folder = ModelFolder(
                self.folder,
                lambda path: opener(lambda: path),
                limit=settings.max_models,
                keep=self.keep,
                adapters=owners,
                open_drafter=drafter,
            )
        self._check(folder, owners)
        return ModelSources(named, folder, budget, sizes.get("pages"))

    def _owners(self) -> dict[str, tuple[AdapterSource, ...]]:
        """The adapters by the model that they are for: NAME@MODEL, or the first model."""
        owners: dict[str, tuple[AdapterSource, ...]] = {}
        for source in self.adapters:
            name, at, model = source.name.rpartition("@")
            if not at:
                name, model = source.name, self.named[0][0] if self.named else ""
            if not model or not NAME.fullmatch(name):
                raise InvalidInput(f"--lora {source.name!r} needs the model that it is for, as in NAME@MODEL=FOLDER")
            owners[model] = (*owners.get(model, ()), replace(source, name=name))
        return owners

    def _drafter(self) -> Callable[[], Drafter] | None:
        name = self.speculate
        if name is None:
            return None
        if named_drafter(name) is None:
            raise InvalidInput(
                f"--speculate is {name!r}, a model that drafts for one other; with several models it must be "
                "prompt-lookup or layers:N"
            )

        def open() -> Drafter:
            drafter = named_drafter(name)
            assert drafter is not None
            return drafter

        return open

    def _check(self, folder: ModelFolder | None, owners: dict[str, tuple[AdapterSource, ...]]) -> None:
        """Raise for a name that no model has."""
        names = {name for name, _ in self.named} | (set() if folder is None else set(folder.sources()))
        for flag, wanted in (("--keep", self.keep), ("--lora", owners)):
            for name in wanted:
                if name not in names:
                    raise InvalidInput(
                        f"{flag} names the model {name!r}; there are {', '.join(sorted(names)) or 'none'}"
                    )


def _check_model(model: str) -> None:
    """Raise for a model that cannot be found: neither on this disk, nor known, nor on a hub."""
    from headway.models.hub import store
    from headway.models.hub.registry import KNOWN, is_hub_id

    if model not in KNOWN and (store.is_on_disk(Path(model).expanduser()) or not is_hub_id(model)):
        store.resolve(model, download=False)


def _sizes_on_disk(model: str) -> ModelSizes | None:
    from headway.models.hub import store

    return read_sizes(store.resolve(model, download=False))
