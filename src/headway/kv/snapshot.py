"""A context on disk: one safetensors file with its pages, its log and a fingerprint of the weights that made it.

A checksum covers every byte of the file, header and body. It stands in the header and is counted as zeros there.
Whatever is wrong with a file, or keeps one from being written, is a `SnapshotError`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.checks import check_integer, check_number
from headway.base.dataclass import dataclass
from headway.base.errors import SnapshotError
from headway.base.specs.brle import Brle
from headway.base.text import shorten

FORMAT = "headway-snapshot-2"
ADAPTED = "headway-snapshot-3"  # with slots that were computed under adapters
AGAIN = "delete it and save it again"
HEADER = 100 << 20  # bytes, the limit of the format
BLANK = b"0" * 64
CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')  # inside other strings the quotes would be escaped


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything a context is, as arrays and plain data.

    `kv` holds the raw bytes of every live page, in order, [pages, bytes]; `state` those of the last token's residual,
    empty when it was not kept. `maker` says what computed them: others compute the same, but not the same bits.
    `program` is the program layer's own data (pending tokens, messages, …). `mixes` are the adapters that slots were
    computed under, by the hash of their weights, with scales; `slot_mixes` [slots] which of them each slot has, -1 for
    none; empty if no slot has any. `recurrent` holds the bytes of the recurrent state after the last slot, empty for a
    model without recurrent layers.
    """

    fingerprint: str
    page_size: int
    dtype: str
    committed: int
    tokens: np.ndarray
    positions: np.ndarray
    masks: tuple[Brle | None, ...]
    discarded: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    repeatable: bool
    kv: np.ndarray
    state: np.ndarray
    program: Mapping[str, Any]
    maker: str = ""
    altered: int | None = None  # the first slot that the log does not explain
    partial: tuple[int, ...] = ()  # slots that attended to more than the log says
    mixes: tuple[tuple[tuple[str, float], ...], ...] = ()
    slot_mixes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    recurrent: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))


class RemoteFile:
    """A file at an fsspec URL, such as s3://bucket/folder/name.safetensors."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._url = url
        try:
            self._files, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:  # of a protocol that needs another package
            raise SnapshotError(f"snapshots cannot be kept at {url!r}: {shorten(str(error), 200)}") from error

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def parent(self) -> str:
        return self._url.rpartition("/")[0]

    def write_whole(self, data: bytes | bytearray) -> None:
        """Object stores show a file when it is complete; a checksum finds out where one that is not does."""
        with _remote_errors():
            self._files.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(self._path, bytes(data))

    def read_bytes(self) -> bytes:
        with _remote_errors():
            return self._files.cat_file(self._path)

    def unlink(self) -> None:
        with _remote_errors():
            if not self._files.exists(self._path):
                raise FileNotFoundError(self._path)
            self._files.rm_file(self._path)


@contextmanager
def _remote_errors() -> Iterator[None]:
    """What the libraries of object stores raise, as `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def write(path: Path | RemoteFile, snapshot: Snapshot) -> None:
    """The snapshot as a file that appears whole or not at all."""
    try:
        data = _packed(snapshot)
    except (TypeError, ValueError, RecursionError) as error:
        raise SnapshotError(f"the snapshot {path.stem!r} cannot be written: {shorten(str(error))}") from error
    try:
        if isinstance(path, RemoteFile):
            path.write_whole(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SnapshotError(
            f"the snapshot {path.stem!r} cannot be written to {path.parent}: {error.strerror or error}; make room or "
            "another folder there, or save it in memory (durable=False)"
        ) from error


def read(path: Path | RemoteFile) -> Snapshot | None:
    """The snapshot in a file, or None if there is no file; anything that does not hold together is refused."""
    try:
        data = path.read_bytes() if isinstance(path, RemoteFile) else _contents(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SnapshotError(f"the snapshot {path.name} cannot be read: {error.strerror or error}") from error
    except MemoryError:
        raise SnapshotError(f"the snapshot {path.name} does not fit in this machine's memory") from None
    try:
        return _parse(*_unpacked(data))
    except Exception as error:  # a file may hold anything
        raise SnapshotError(f"the snapshot {path.name} cannot be read: {shorten(str(error), 200)}; {AGAIN}") from error


def _contents(path: Path) -> bytes:
    """What a file holds. One that is longer or shorter than its header says is damaged and not read any further."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # it may be a pipe that nobody writes to
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), HEADER))
        try:
            last = max(part["data_offsets"][1] for name, part in json.loads(header).items() if name != "__metadata__")
        except Exception:  # it may be anything
            return start + header
        if len(start) + len(header) + last != status.st_size:
            return start + header
        file.seek(0)
        return file.read()


def remove(path: Path | RemoteFile) -> bool:
    """Delete a file; False if there was none."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SnapshotError(
            f"the snapshot {path.name} cannot be deleted from {path.parent}: {error.strerror or error}"
        ) from error
    return True


def _packed(snapshot: Snapshot) -> bytearray:
    from safetensors.numpy import save

    masked = [(i, m.runs) for i, m in enumerate(snapshot.masks) if m is not None]
    arrays = {
        "tokens": snapshot.tokens,
        "positions": snapshot.positions,
        "kv": snapshot.kv,
        "state": snapshot.state,
        "mask_slots": np.array([i for i, _ in masked], dtype=np.int64),
        "mask_counts": np.array([len(runs) for _, runs in masked], dtype=np.int64),
        "mask_runs": np.array([r for _, runs in masked for r in runs], dtype=np.int64),
    }
    facts = {
        "fingerprint": snapshot.fingerprint,
        "page_size": snapshot.page_size,
        "dtype": snapshot.dtype,
        "committed": snapshot.committed,
        "discarded": list(snapshot.discarded),
        "spans": [list(s) for s in snapshot.spans],
        "repeatable": snapshot.repeatable,
        "program": dict(snapshot.program),
        "maker": snapshot.maker,
        "altered": snapshot.altered,
        "partial": list(snapshot.partial),
    }
    if snapshot.recurrent.size:
        arrays["recurrent"] = snapshot.recurrent
    if snapshot.mixes:
        arrays["slot_mixes"] = snapshot.slot_mixes
        facts["mixes"] = snapshot.mixes
    metadata = {"format": ADAPTED if snapshot.mixes else FORMAT, "checksum": BLANK.decode(), "facts": json.dumps(facts)}
    data = bytearray(save(arrays, metadata=metadata))
    start, stop = _checksum_at(data)
    data[start:stop] = blake2b(data, digest_size=32).hexdigest().encode()
    return data


def _checksum_at(data: bytes | bytearray) -> tuple[int, int]:
    """Where the checksum stands in the header."""
    match = CHECKSUM.search(data, 8, 8 + int.from_bytes(data[:8], "little"))
    if match is None:
        raise SnapshotError("it has no checksum, so it is damaged or of another version")
    return match.span(1)


def _unpacked(data: bytes) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
    """The facts and arrays of a file whose checksum is right."""
    from safetensors.numpy import load

    start, stop = _checksum_at(data)
    digest = blake2b(digest_size=32)
    for part in (memoryview(data)[:start], BLANK, memoryview(data)[stop:]):
        digest.update(part)
    if digest.hexdigest().encode() != data[start:stop]:
        raise SnapshotError("its checksum does not match, so the file is damaged")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header["__metadata__"]
    if metadata.get("format") not in (FORMAT, ADAPTED):
        raise SnapshotError(
            f"its format is {metadata.get('format')!r} and this version reads {FORMAT!r} and {ADAPTED!r}"
        )
    return json.loads(metadata["facts"]), load(data)


def _parse(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Snapshot:
    """The snapshot, if its parts fit each other."""
    log = ("tokens", "positions", "mask_slots", "mask_counts", "mask_runs")
    _require(all(arrays[name].ndim == 1 and arrays[name].dtype == np.int64 for name in log), "the log is not flat")
    tokens, positions, kv = arrays["tokens"], arrays["positions"], arrays["kv"]
    _require(len(tokens) == len(positions), "the log's lengths differ")
    size = check_integer(facts["page_size"], "page_size", 1)
    pages, committed = -(-len(tokens) // size), check_integer(facts["committed"], "committed")
    discarded = [check_integer(i, "a discarded page", high=pages - 1) for i in facts["discarded"]]
    spans = [(check_integer(a, "a span"), check_integer(b, "a span")) for a, b in facts["spans"]]
    borders = [0, *(border for span in spans for border in span)]
    _require(sorted(set(discarded)) == discarded, "discarded pages are out of order")
    _require(sorted(borders) == borders and all(a < b for a, b in spans), "spans are out of order")
    _require(all(a < len(tokens) for a, _ in spans), "a span lies after the last slot")
    _require(committed * size <= len(tokens), "more is committed than there is")
    _require(kv.ndim == 2 and len(kv) == pages - len(discarded), "pages are missing")
    _require(isinstance(facts["repeatable"], bool) and isinstance(facts["program"], dict), "a field has another type")
    altered = facts.get("altered")
    if altered is not None:
        check_integer(altered, "the first altered slot", high=max(0, len(tokens) - 1))
    _require(not facts["repeatable"] or all(b <= len(tokens) for _, b in spans), "a span is cut off")
    mixes, slot_mixes = facts.get("mixes", ()), arrays.get("slot_mixes", np.empty(0, np.int64))
    _require(
        slot_mixes.dtype == np.int64 and slot_mixes.shape == (len(tokens) if mixes else 0,), "adapters are missing"
    )
    _require(bool(((slot_mixes >= -1) & (slot_mixes < len(mixes))).all()), "a slot has unknown adapters")
    return Snapshot(
        fingerprint=str(facts["fingerprint"]),
        page_size=size,
        dtype=str(facts["dtype"]),
        committed=committed,
        tokens=tokens,
        positions=positions,
        masks=_masks(len(tokens), spans, arrays),
        discarded=tuple(discarded),
        spans=tuple(spans),
        repeatable=facts["repeatable"],
        kv=kv,
        state=arrays["state"],
        program=facts["program"],
        maker=str(facts["maker"]),
        altered=altered,
        partial=tuple(check_integer(slot, "a partial slot", high=len(tokens) - 1) for slot in facts.get("partial", ())),
        mixes=tuple(tuple((str(digest), check_number(scale, "a scale")) for digest, scale in mix) for mix in mixes),
        slot_mixes=slot_mixes,
        recurrent=arrays.get("recurrent", np.empty(0, np.uint8)),
    )


def _masks(length: int, spans: list[tuple[int, int]], arrays: Mapping[str, np.ndarray]) -> tuple[Brle | None, ...]:
    """What each slot attended to; each mask must end at its slot, or at the end of its pass if that was not causal."""
    masks: list[Brle | None] = [None] * length
    slots, counts, runs = arrays["mask_slots"], arrays["mask_counts"], arrays["mask_runs"].tolist()
    _require(bool((counts >= 0).all()) and int(counts.sum()) == len(runs), "mask runs are missing")
    for slot, count, end in zip(slots.tolist(), counts.tolist(), np.cumsum(counts).tolist(), strict=True):
        _require(0 <= slot < length, "a mask has no slot")
        mask = Brle.from_runs(runs[end - count : end])
        ends = {slot + 1, *(b for a, b in spans if a <= slot < b)}
        _require(len(mask) in ends and mask.any(), f"the mask of slot {slot} does not fit it")
        masks[slot] = mask
    return tuple(masks)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise SnapshotError(why)
