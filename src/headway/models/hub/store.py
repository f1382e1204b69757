"""The model store: resolves a name, path or hub id to a path on disk, and fetches what is missing.

Owns the model part of the cache folder. Known names live under `models/<name>/`, hub repositories under
`hub/<org>/<name>/`; one lock file for each keeps two processes from fetching the same model. Never opens a model.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from headway.base.config import settings
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, ModelError, ModelNotFound, WrongType
from headway.base.system.notebook import NotebookBar, in_notebook
from headway.base.text import format_bytes, short_repr, shorten
from headway.models.hub.registry import KNOWN, KnownModel, is_hub_id, nearby

if TYPE_CHECKING:
    from headway.models.hub.fetch import FetchProgress

SOURCE_NOTE = "source.txt"
LONGEST_NAME = 255  # characters of a name in a message


@dataclass(frozen=True)
class StoredModel:
    """A model in the store, or a known one that is not installed: its path, size and source."""

    name: str
    path: Path
    bytes: int
    source: str
    installed: bool


def resolve(
    model: str | Path,
    *,
    progress: FetchProgress | None = None,
    download: bool = True,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """The folder or `.gguf` file that `model` means: a known name, a path, or a hub id `org/name`.

    A model that is not on this disk is fetched, unless `download` is False. `revision` (a branch, tag or commit) and
    `token` are for hub ids. Without `progress`, a notebook shows a bar.
    """
    if not isinstance(model, str | os.PathLike):
        raise WrongType(f"the model is {short_repr(model, 60)}; it must be a name, a folder, a .gguf file or a hub id")
    text = str(model)
    if isinstance(model, str) and text in KNOWN:
        known = KNOWN[text]
        if is_installed(known):
            return model_path(known)
        return _fetched(text, progress or _default_progress(), download)
    path = Path(model).expanduser()
    if text.strip() and is_on_disk(path):
        return _checked_path(path)
    if isinstance(model, str) and is_hub_id(text):
        folder = _hub_folder(text, revision)
        if folder.is_dir():
            return folder
        if download and (revision is not None or token is not None):
            return _pull_repo(text, progress or _default_progress(), revision, token)
        return _fetched(text, progress or _default_progress(), download)
    raise _not_found(text)


def _default_progress() -> FetchProgress:
    return NotebookBar(lambda count: format_bytes(count, 1000)) if in_notebook() else _fetch().silent


def is_on_disk(path: Path) -> bool:
    """Whether there is a file or folder `path`; False for a name that none can have."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def pull(model: str, *, progress: FetchProgress | None = None) -> Path:
    """Fetch a known name or hub id. An existing file is checked against its pinned hash, and replaced if it differs."""
    if model in KNOWN:
        return pull_known(KNOWN[model], progress=progress)
    if is_hub_id(model):
        return _pull_repo(model, progress or _default_progress())
    if is_on_disk(Path(model).expanduser()):
        raise InvalidInput(f"{model!r} is already on this disk; pass it with --model, there is nothing to pull")
    raise _not_found(model)


def pull_known(model: KnownModel, *, progress: FetchProgress | None = None) -> Path:
    """The path of `model`'s pinned file or folder, fetched if it is missing or does not match its hash."""
    report, target = progress or _default_progress(), path_of(model)
    with _locked(model.name, report):
        if is_installed(model) and _as_pinned(model, report):
            return model_path(model)
        with _writing(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            source = _fetch().fetch_file(model, target, offline=settings().hub_offline, progress=report)
            (target.parent / SOURCE_NOTE).write_text(f"{source}\n")
    return model_path(model)


def list_models() -> list[StoredModel]:
    """Every known name, and every hub repository in the cache."""
    known = [_stored_known(model) for model in KNOWN.values()]
    folders = sorted(path for path in (settings().cache / "hub").glob("[!.]*/[!.]*") if path.is_dir())
    return known + [
        StoredModel(f"{path.parent.name}/{path.name}", path, _bytes_under(path), "Hugging Face hub", True)
        for path in folders
    ]


def remove(name: str) -> int:
    """Delete a model from the cache; returns the bytes freed."""
    if name not in KNOWN and not is_hub_id(name):
        if is_on_disk(Path(name).expanduser()):
            raise InvalidInput(f"{name!r} is not in Headway's cache; only models that were pulled can be removed")
        raise _not_found(name)
    folder = path_of(KNOWN[name]).parent if name in KNOWN else _hub_folder(name)
    if not folder.is_dir():
        raise ModelNotFound(
            f"{name} is not installed, so there is nothing to remove; `headway models list` shows what is"
        )
    with _locked(name, _fetch().silent), _writing(folder):
        freed = _bytes_under(folder)
        doomed = folder.with_name(f".removed-{os.getpid()}-{folder.name}")
        os.replace(folder, doomed)  # in one step, so that nobody sees half a model
        shutil.rmtree(doomed)
    return freed


def path_of(model: KnownModel) -> Path:
    """The path of a known model's file in the cache, whether it exists or not."""
    return settings().cache / "models" / model.name / model.file


def model_path(model: KnownModel) -> Path:
    """The path a known model is loaded from: its file, or the folder of its files."""
    return path_of(model).parent if model.extra_files else path_of(model)


def is_installed(model: KnownModel) -> bool:
    """Whether the pinned files are in the cache; only whole, checked files ever get their names."""
    folder = path_of(model).parent
    return all(
        (folder / file.file).is_file() and (folder / file.file).stat().st_size == file.bytes
        for file in (model, *model.extra_files)
    )


def _as_pinned(model: KnownModel, progress: FetchProgress) -> bool:
    folder, label = path_of(model).parent, f"checking {model.name}"
    return all(
        _fetch().sha256_of(folder / file.file, progress=progress, label=label) == file.sha256
        for file in (model, *model.extra_files)
    )


def _fetched(name: str, progress: FetchProgress | None, download: bool) -> Path:
    if not download:
        raise ModelNotFound(f"{name} is not in the cache; `headway models pull {name}` fetches it")
    return pull(name, progress=progress)


def _pull_repo(
    repo: str, progress: FetchProgress, revision: str | None = None, token: str | bool | None = None
) -> Path:
    folder = _hub_folder(repo, revision)
    with _locked(repo, progress):
        if folder.is_dir():
            return folder
        if settings().hub_offline:
            raise ModelNotFound(
                f"{repo} is not in the cache and HF_HUB_OFFLINE is set, so the Hugging Face hub was not contacted; "
                "unset it, or pass a local folder or .gguf file with --model"
            )
        with _writing(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _fetch().fetch_repo(repo, folder, progress=progress, revision=revision, token=token)
    return folder


def _checked_path(path: Path) -> Path:
    if path.is_dir() or path.suffix.lower() == ".gguf":
        return path
    raise InvalidInput(f"{str(path)!r} is neither a folder nor a .gguf file; pass the folder that holds config.json")


def _not_found(text: str) -> ModelNotFound:
    close = nearby(text)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return ModelNotFound(
        f"there is no model {shorten(repr(text), LONGEST_NAME)}: it is neither a known name "
        f"({', '.join(sorted(KNOWN))}), an existing folder or .gguf file, nor a hub id like org/name{hint}"
    )


def _stored_known(model: KnownModel) -> StoredModel:
    path = path_of(model)
    if not is_installed(model):
        return StoredModel(model.name, path, model.bytes, str(model.sources[0]), False)
    note = path.parent / SOURCE_NOTE
    source = note.read_text().strip() if note.is_file() else "unknown"
    return StoredModel(model.name, path, model.bytes, source, True)


def _hub_folder(repo: str, revision: str | None = None) -> Path:
    """Where a repository is kept; a revision other than main has a folder of its own."""
    name = repo if revision in (None, "main") else f"{repo}@{revision.replace('/', '--')}"
    return settings().cache / "hub" / name


def _bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def _locked(name: str, progress: FetchProgress) -> Iterator[None]:
    """Hold the model's lock file; the system releases it when the process ends, however it ends."""
    folder = settings().cache / "locks"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{name.replace('/', '--')}.lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0, None, f"waiting for another process that is fetching {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise `ModelError` for a disk that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write to {folder}: {error.strerror or error}; HEADWAY_CACHE chooses another cache folder"
        ) from error


def _fetch() -> ModuleType:
    """What downloads; imported when it is needed, for it brings an HTTP client."""
    from headway.models.hub import fetch

    return fetch
