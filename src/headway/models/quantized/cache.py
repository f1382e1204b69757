"""Repacked weights on disk, so that a model that was loaded once is mapped and used as it lies.

    cache/weights/<key>.weights     MAGIC, the header's SHA-256 and length, the header (JSON), arrays at cache lines

The key covers the files' paths, sizes and times, a hash of their headers, how they were loaded and the format here.
Contents have a checksum. What is damaged, of another version or half written is made again; a folder that cannot be
written, or does not belong to this user alone, is not used. Nothing in a file can run code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.arrays import LINE
from headway.base.dataclass import dataclass
from headway.base.system.log import LOGGER
from headway.base.text import format_bytes
from headway.kernels.host.quantized import QuantizedMatrix
from headway.models.config import ModelConfig
from headway.models.files.weights import Weights
from headway.models.quantized.cpu import (
    ALL_MATRICES,
    OUTER_MATRICES,
    OUTER_VECTORS,
    VECTORS,
    QuantizedDecoder,
    QuantizedLayer,
)

VERSION = 4  # of this format, and of what repacking makes
MAGIC = b"headway weights\n"
LEAST = 16 << 20  # bytes of a model that is worth a file
CHUNK = 1 << 16  # bytes that share a sum
_LOG = logging.getLogger(LOGGER)
OUTER = ("final_norm", "inv_freq", *OUTER_VECTORS)


class DamagedCache(ValueError):
    """A file that does not hold what it should."""


@dataclass(frozen=True)
class WeightCache:
    """The cache in a folder, at most `limit` bytes of it."""

    folder: Path
    limit: int

    def load(self, key: str, config: ModelConfig) -> QuantizedDecoder | None:
        """The decoder that was stored under a key, or None."""
        path = self._path(key)
        try:
            if not self._is_private() or not path.is_file():
                return None
            decoder = _read(path, key, config)
            os.utime(path)  # the least recently used go first
            return decoder
        except DamagedCache as error:
            _LOG.warning("the cached weights %s are not used: %s; they are made again", path, error)
        except OSError as error:
            _LOG.warning("the cached weights %s cannot be read (%s); they are made again", path, error.strerror)
        return None

    def store(self, key: str, decoder: QuantizedDecoder) -> None:
        """Keep a decoder for the next time; that one cannot be kept is not an error."""
        size = sum(array.nbytes for array in decoder.arrays())
        if not LEAST <= size <= self.limit:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private():
                return
            self._make_room(size)
            _write(self._path(key), key, decoder)
        except OSError as error:
            _LOG.warning("the weights are not cached: %s cannot be written (%s)", self.folder, error.strerror)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.weights"

    def _is_private(self) -> bool:
        """Whether the folder is this user's alone; what others could write is not trusted."""
        if not self.folder.is_dir():
            return False
        about = self.folder.stat()
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            _LOG.warning("the cache of weights %s is not used: others may read or write it; chmod 700", self.folder)
            return False
        return True

    def _make_room(self, size: int) -> None:
        kept = sorted(self.folder.glob("*.weights"), key=lambda path: path.stat().st_mtime)
        used = sum(path.stat().st_size for path in kept)
        for path in kept:
            if used + size <= self.limit:
                return
            used -= path.stat().st_size
            path.unlink(missing_ok=True)
            _LOG.info("the cached weights %s made room for others (%s)", path.name, format_bytes(self.limit))


def cache_key(path: Path, weights: Weights, **how: object) -> str:
    """The name of what is stored for these files, loaded like this."""
    digest = hashlib.sha256(json.dumps([VERSION, how], sort_keys=True).encode())
    for file in [path] if path.is_file() else [*sorted(path.glob("*.safetensors")), path / "config.json"]:
        about = file.stat()
        digest.update(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}\n".encode())
    headers: dict[int, tuple[mmap.mmap, int]] = {}
    for name in weights.names():
        span = weights.span(name)
        _, first = headers.get(id(span.data), (span.data, span.offset))
        headers[id(span.data)] = span.data, min(first, span.offset)
    for data, end in headers.values():
        digest.update(memoryview(data)[:end])
    return digest.hexdigest()


# -- a decoder as entries ----------------------------------------------------------------------------------------------


def _matrices(decoder: QuantizedDecoder) -> Iterator[tuple[str, QuantizedMatrix]]:
    yield "embedding", decoder.embedding
    if decoder.output is not decoder.embedding:
        yield "output", decoder.output
    yield from decoder.outer_matrices().items()
    for i, layer in enumerate(decoder.layers):
        for name in ALL_MATRICES:
            if (matrix := getattr(layer, name)) is not None:
                yield f"{i}.{name}", matrix


def _vectors(decoder: QuantizedDecoder) -> Iterator[tuple[str, np.ndarray]]:
    for name in OUTER:
        if (vector := getattr(decoder, name)) is not None:
            yield name, vector
    for i, layer in enumerate(decoder.layers):
        for name in VECTORS:
            if (vector := getattr(layer, name)) is not None:
                yield f"{i}.{name}", vector


def _rebuilt(
    config: ModelConfig, matrices: dict[str, QuantizedMatrix], vectors: dict[str, np.ndarray]
) -> QuantizedDecoder:
    layers = []
    for i in range(config.layers):
        parts: dict[str, Any] = {name: matrices.get(f"{i}.{name}") for name in ALL_MATRICES}
        parts |= {name: vectors.get(f"{i}.{name}") for name in VECTORS}
        layers.append(QuantizedLayer(**parts))
    embedding = matrices["embedding"]
    outer: dict[str, Any] = {name: vectors[name] for name in OUTER if name in vectors}
    outer |= {name: matrices[name] for name in OUTER_MATRICES if name in matrices}
    return QuantizedDecoder(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        output=matrices.get("output", embedding),
        **outer,
    )


# -- files -------------------------------------------------------------------------------------------------------------


def _write(path: Path, key: str, decoder: QuantizedDecoder) -> None:
    arrays: list[np.ndarray] = []
    offset = 0

    def place(array: np.ndarray | None) -> list[Any] | None:
        nonlocal offset
        if array is None:
            return None
        at, offset = offset, offset + -(-array.nbytes // LINE) * LINE
        arrays.append(array)
        return [at, list(array.shape), array.dtype.str]

    def entry(w: QuantizedMatrix) -> dict[str, Any]:
        values = {field.name: getattr(w, field.name) for field in fields(w)}
        return {n: place(v) if n in ("quants", "scales", "super", "bias") else v for n, v in values.items()}

    header: dict[str, Any] = {"version": VERSION, "key": key}
    header["matrices"] = {name: entry(w) for name, w in _matrices(decoder)}
    header["vectors"] = {name: place(array) for name, array in _vectors(decoder)}
    body = b"".join(_padded(array) for array in arrays)
    header["size"], header["checksum"] = len(body), _checksum(np.frombuffer(body, np.uint8))
    text = json.dumps(header).encode()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as file:
        try:
            file.write(MAGIC + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + text)
            file.write(bytes(-file.tell() % mmap.PAGESIZE))
            file.write(body)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _padded(array: np.ndarray) -> bytes:
    return array.tobytes() + bytes(-array.nbytes % LINE)


def _read(path: Path, key: str, config: ModelConfig) -> QuantizedDecoder:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(len(MAGIC) + 40)
        _check(len(first) == len(MAGIC) + 40 and first.startswith(MAGIC), "it is not a file of weights")
        length = int.from_bytes(first[-8:], "little")
        _check(length < size, "it is cut off")
        text = file.read(length)
        _check(hashlib.sha256(text).digest() == first[len(MAGIC) : -8], "its header is damaged")
        header = json.loads(text)
        _check(header.get("version") == VERSION, f"it has version {header.get('version')}, and this is {VERSION}")
        _check(header.get("key") == key, "it belongs to another model")
        start = -(-(len(first) + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        _check(size == start + header["size"], "it is cut off")
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    whole = np.frombuffer(data, np.uint8, header["size"], start)
    with ThreadPoolExecutor(1) as beside:  # sums hold no lock of the interpreter's
        checksum = beside.submit(_checksum, whole)
        decoder = _placed(whole, header, config)
    _check(checksum.result() == header["checksum"], "its contents are damaged")
    return decoder


def _placed(whole: np.ndarray, header: dict[str, Any], config: ModelConfig) -> QuantizedDecoder:
    """The decoder of a header, with arrays in `whole`."""

    def array(entry: Sequence[Any] | None) -> np.ndarray | None:
        if entry is None:
            return None
        at, shape, dtype = entry
        kind = np.dtype(dtype)
        count = math.prod(shape) * kind.itemsize
        return whole[at : at + count].view(kind).reshape(shape)

    def matrix(entry: dict[str, Any]) -> QuantizedMatrix:
        held = ("quants", "scales", "super", "bias")
        parts: dict[str, Any] = {n: array(v) if n in held else v for n, v in entry.items()}
        return QuantizedMatrix(**parts)

    matrices = {name: matrix(entry) for name, entry in header["matrices"].items()}
    vectors: dict[str, Any] = {name: array(entry) for name, entry in header["vectors"].items()}
    return _rebuilt(config, matrices, vectors)


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise DamagedCache(why)


def _checksum(data: np.ndarray) -> str:
    """A hash of the sum and the parity of every chunk: as quick as memory, and other for any changed word."""
    words = data.view(np.uint64)
    whole = len(words) // (CHUNK // 8) * (CHUNK // 8)
    digest = hashlib.sha256(len(words).to_bytes(8, "little"))
    reductions: tuple[Callable[..., Any], ...] = (np.add.reduce, np.bitwise_xor.reduce)
    for part in (words[:whole].reshape(-1, CHUNK // 8), words[whole:].reshape(1, -1)):
        for reduce in reductions:
            digest.update(np.ascontiguousarray(reduce(part, axis=1)).data)
    return digest.hexdigest()
