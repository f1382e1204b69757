"""A model's tensors by name, from a folder of safetensors or a GGUF file.

Owns the safetensors header and index and their checks, and the way from stored bytes to a tensor on a device. Files are
mapped, never read whole: loading makes the tensor that was asked for and a chunk of temporaries, or no copy at all.
It never runs a pickle and knows nothing of what the names mean.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from headway.base.errors import BadModelFile, Closed, InvalidInput, ModelNotFound, Unsupported
from headway.models.dequant import FLOATS, as_floats, convert_floats, dequantize
from headway.models.gguf import GgufFile
from headway.models.mapped import Span, map_file, short, unmap

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes of JSON, the safetensors format's own limit
MAX_DIMS = 8

# Bits a value takes, for every dtype a safetensors header may name. Only `FLOATS` can be loaded.
_BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
        **dict.fromkeys(("F32", "I32", "U32"), 32),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        "F4": 4,
    }
)


class Weights(Protocol):
    """The tensors of one model. Asking for a name that is not there raises `BadModelFile`."""

    def names(self) -> Sequence[str]:
        """Every tensor's name, in the file's order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, in torch's order."""
        ...

    def stored(self, name: str) -> str:
        """The type it is stored in, such as `BF16` or `Q4_1`."""
        ...

    def nbytes(self, name: str) -> int:
        """The bytes it takes in the file."""
        ...

    def load(self, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor as `dtype` on `device`. A value that `dtype` can only hold as infinity raises `Unsupported`.

        On the CPU, with the stored type asked for, it is a view of the file's private map: the tensor keeps the map
        alive, also after `close()`, and writing to it changes this process's memory and never the file.
        """
        ...

    def span(self, name: str) -> Span:
        """Where its stored bytes lie. A type that cannot be loaded raises `Unsupported`."""
        ...

    def close(self) -> None:
        """Let go of the files. Tensors already loaded stay valid."""
        ...


def open_weights(path: str | os.PathLike[str]) -> SafetensorsWeights | GgufWeights:
    """The weights in a folder of safetensors, or in a GGUF file."""
    where = Path(path)
    if os.path.isdir(where):
        return SafetensorsWeights(where)
    if where.suffix == ".safetensors":
        raise InvalidInput(f"{where} is one file of a model; pass its folder, {where.parent}, with the config in it")
    if where.suffix.lower() != ".gguf" and os.path.isfile(where) and not _starts_as_gguf(where):
        raise BadModelFile(f"{where} is neither a GGUF file nor a folder; pass a .gguf file or a folder with {SINGLE}")
    file = GgufFile.open(where)
    try:
        return GgufWeights(file)
    except BaseException:
        file.close()
        raise


def _starts_as_gguf(path: Path) -> bool:
    # Files in the hub's cache are named by their hash.
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror or error}") from None


class GgufWeights:
    """The tensors of an open GGUF file, which it closes."""

    def __init__(self, file: GgufFile) -> None:
        parts = file.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise Unsupported(
                f"{file.path} is one of {parts} parts of a model; merge them with `llama-gguf-split --merge` first"
            )
        self.file = file

    def names(self) -> Sequence[str]:
        return tuple(self.file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return _find(self.file.tensors, name, self.file.path).shape

    def stored(self, name: str) -> str:
        return _find(self.file.tensors, name, self.file.path).kind

    def nbytes(self, name: str) -> int:
        return _find(self.file.tensors, name, self.file.path).nbytes

    def load(self, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = _find(self.file.tensors, name, self.file.path)
        raw = torch.from_numpy(self.file.raw(name))
        return _to_tensor(
            raw, tensor.kind, tensor.shape, f"{self.file.path}: tensor {name!r}", dtype=dtype, device=device
        )

    def span(self, name: str) -> Span:
        return self.file.span(name)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a safetensors file; `offset` counts from the start of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class SafetensorsWeights:
    """The tensors of a folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Where both are there the single file is used, as Hugging Face does.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._maps: dict[Path, mmap.mmap] = {}
        self._entries: dict[str, _Entry] = {}
        self._closed = False
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return _find(self._entries, name, self.folder).shape

    def stored(self, name: str) -> str:
        return _find(self._entries, name, self.folder).dtype

    def nbytes(self, name: str) -> int:
        return _find(self._entries, name, self.folder).nbytes

    def load(self, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        entry, raw = _find(self._entries, name, self.folder), torch.from_numpy(self.span(name).bytes())
        what = f"{entry.file}: tensor {name!r}"
        return _to_tensor(raw, entry.dtype, entry.shape, what, dtype=dtype, device=device)

    def span(self, name: str) -> Span:
        entry = _find(self._entries, name, self.folder)
        if self._closed:
            raise Closed(f"the weights of {self.folder} are closed; open them again to load {name!r}")
        if entry.dtype not in FLOATS:
            raise Unsupported(
                f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; "
                f"Headway loads weights stored as {', '.join(FLOATS)}"
            )
        return Span(self._maps[entry.file], entry.offset, entry.nbytes)

    def close(self) -> None:
        self._closed = True
        while self._maps:
            unmap(self._maps.popitem()[1])

    def __enter__(self) -> SafetensorsWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _read(self) -> None:
        if os.path.exists(self.folder / SINGLE):
            self._add(self.folder / SINGLE)
        elif os.path.exists(self.folder / INDEX):
            self._read_shards(self.folder / INDEX)
        else:
            _refuse_folder(self.folder)

    def _read_shards(self, index: Path) -> None:
        places = _read_index(index)
        for shard in dict.fromkeys(places.values()):
            try:
                self._add(self.folder / shard)
            except ModelNotFound:
                raise BadModelFile(
                    f"{index} lists the file {short(shard)}, which is not in the folder; download it again"
                ) from None
        for name, shard in places.items():
            entry = self._entries.get(name)
            if entry is None or entry.file.name != shard:
                raise BadModelFile(f"{index} puts tensor {short(name)} in {short(shard)}, which does not hold it")

    def _add(self, file: Path) -> None:
        self._maps[file] = map_file(file)
        for name, entry in _read_header(file, self._maps[file]).items():
            if name in self._entries:
                raise BadModelFile(f"tensor {short(name)} is in both {self._entries[name].file} and {file.name}")
            self._entries[name] = entry


def _refuse_folder(folder: Path) -> NoReturn:
    try:
        found = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"the folder {folder} cannot be read: {reason}; check the path") from None
    if any(name.startswith("pytorch_model") and name.endswith((".bin", ".json")) for name in found):
        raise BadModelFile(
            f"{folder} holds its weights as a pickle (pytorch_model.bin), which can run code and is never loaded; "
            "convert it with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    for name in found:
        if name.lower().endswith(".gguf"):
            raise BadModelFile(f"{folder} has no {SINGLE}; to use its GGUF file pass the file itself: {folder / name}")
    raise BadModelFile(f"{folder} has neither {SINGLE} nor {INDEX}; pass a folder with weights in safetensors")


def _to_tensor(
    raw: torch.Tensor, stored: str, shape: tuple[int, ...], what: str, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if dtype not in FLOATS.values():
        known = ", ".join(str(known).removeprefix("torch.") for known in FLOATS.values())
        raise InvalidInput(f"{what} cannot be loaded as {dtype}; weights load as one of {known}")
    if FLOATS.get(stored) == dtype and device.type == "cpu":
        return as_floats(raw, dtype).view(shape)
    out = torch.empty(shape, dtype=dtype, device=device)
    try:
        if stored in FLOATS:
            convert_floats(raw, FLOATS[stored], out)
        else:
            dequantize(stored, raw, shape, dtype, out)
    except Unsupported as error:
        raise Unsupported(f"{what}, stored as {stored}: {error}") from None
    return out


_Item = TypeVar("_Item")


def _find(items: Mapping[str, _Item], name: str, where: Path) -> _Item:
    item = items.get(name)
    if item is None:
        some = ", ".join(short(other) for other in list(items)[:3])
        raise BadModelFile(f"{where} has no tensor {name!r}; it has {len(items)}: {some} …")
    return item


def _read_index(path: Path) -> dict[str, str]:
    """Which file of the folder holds each tensor."""
    with map_file(path) as data:
        if len(data) > MAX_HEADER:
            raise BadModelFile(f"{path} has {len(data)} bytes; the limit is {MAX_HEADER}")
        index = _read_json(data[:], f"{path}")
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise BadModelFile(f"{path} has no weight_map from tensor names to files; download it again")
    for name, shard in places.items():
        _check_shard_name(path, name, shard)
    return places


def _check_shard_name(path: Path, name: str, shard: object) -> None:
    plain = isinstance(shard, str) and not any(c in shard for c in "/\\\0") and shard.endswith(".safetensors")
    if not plain:
        raise BadModelFile(
            f"{path} puts tensor {short(name)} in {short(shard)}; it must be a .safetensors file of the same folder"
        )


def _read_header(path: Path, data: mmap.mmap) -> dict[str, _Entry]:
    """The tensors of one safetensors file: a u64 length, that many bytes of JSON, then the tensors' bytes."""
    if len(data) < 8:
        raise BadModelFile(f"{path} has {len(data)} bytes, too few for a safetensors header; download it again")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        raise BadModelFile(f"{path}: the header length is {length}; the limit is {MAX_HEADER}, so it is no safetensors")
    if 8 + length > len(data):
        raise BadModelFile(f"{path}: the header takes {length} bytes, but the file has {len(data)}; it is truncated")
    header = _read_json(data[8 : 8 + length], f"{path}: the header")
    _check_metadata(path, header.pop("__metadata__", None))
    entries = {name: _entry(path, name, value, 8 + length, len(data)) for name, value in header.items()}
    _refuse_overlaps(path, entries)
    return entries


def _read_json(text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, value in pairs:
            if key in items:
                raise BadModelFile(f"{what} has the key {short(key)} twice")
            items[key] = value
        return items

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except BadModelFile:
        raise
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{what} is not JSON: {str(error)[:160]}") from None
    if not isinstance(value, dict):
        raise BadModelFile(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadModelFile(f"{path}: __metadata__ is {short(metadata)}; it must map names to strings")


def _entry(path: Path, name: str, value: object, data_start: int, size: int) -> _Entry:
    what = f"{path}: tensor {short(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadModelFile(f"{what} is {short(value)}; it must have exactly dtype, shape and data_offsets")
    dtype, shape = value["dtype"], value["shape"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise BadModelFile(f"{what} has the dtype {short(dtype)}; the format has {', '.join(_BITS)}")
    _check_shape(what, shape)
    start, stop = _offsets(what, value["data_offsets"], size - data_start)
    bits = prod(shape) * _BITS[dtype]
    if bits != (stop - start) * 8:
        raise BadModelFile(
            f"{what} with shape {short(shape)} as {dtype} takes {-(-bits // 8)} bytes, "
            f"but its data_offsets span {stop - start}"
        )
    return _Entry(path, tuple(shape), dtype, data_start + start, stop - start)


def _check_shape(what: str, shape: object) -> None:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise BadModelFile(f"{what} has the shape {short(shape)}; it must be a list of whole numbers")
    if len(shape) > MAX_DIMS:
        raise BadModelFile(f"{what} has {len(shape)} dimensions; the limit is {MAX_DIMS}")
    # An empty tensor takes no bytes whatever its other dimensions, but torch multiplies them.
    if prod(max(n, 1) for n in shape) >= 1 << 60:
        raise BadModelFile(f"{what} has the shape {short(shape)}, of more than 2^60 values")


def _offsets(what: str, offsets: object, limit: int) -> tuple[int, int]:
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise BadModelFile(f"{what} has data_offsets {short(offsets)}; they must be two whole numbers")
    start, stop = offsets
    if not 0 <= start <= stop <= limit:
        raise BadModelFile(
            f"{what} lies at {short(offsets)} of {limit} bytes of data; the file is truncated or its header wrong"
        )
    return start, stop


def _refuse_overlaps(path: Path, entries: Mapping[str, _Entry]) -> None:
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.nbytes and entry.offset < end:
            raise BadModelFile(
                f"{path}: tensor {short(name)} starts at byte {entry.offset}, "
                f"inside tensor {short(before)}, which ends at byte {end}"
            )
        if entry.nbytes:
            end, before = entry.offset + entry.nbytes, name
