"""The headers of safetensors files, and the index of a folder of them.

Owns the reading of both: lengths, types, shapes and offsets are checked against the file before they are used. It never
reads a tensor's bytes (`weights` does) and does not know what the names mean.

    length u64 · that many bytes of JSON: name → dtype, shape, data_offsets
    the tensors' bytes; offsets count from here
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile
from headway.base.text import short_repr
from headway.models.files.mapped import map_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes of JSON, the safetensors format's own limit
MAX_DIMS = 8

# Bits a value takes, for every dtype a safetensors header may name. Only `dequant.FLOATS` can be loaded.
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file; `offset` counts from the start of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


def read_index(path: Path) -> dict[str, str]:
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
            f"{path} puts tensor {short_repr(name)} in {short_repr(shard)}; "
            "it must be a .safetensors file of the same folder"
        )


def read_entries(path: Path, data: mmap.mmap) -> dict[str, Entry]:
    """The tensors of one file, by name."""
    if len(data) < 8:
        raise BadModelFile(f"{path} has {len(data)} bytes, too few for a safetensors header; download it again")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        raise BadModelFile(
            f"{path}: the header length is {length}; the limit is {MAX_HEADER}, so it is not a safetensors file"
        )
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
                raise BadModelFile(f"{what} has the key {short_repr(key)} twice")
            items[key] = value
        return items

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except BadModelFile:
        raise
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{what} is not valid JSON: {str(error)[:160]}") from None
    if not isinstance(value, dict):
        raise BadModelFile(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadModelFile(f"{path}: __metadata__ is {short_repr(metadata)}; it must map names to strings")


def _entry(path: Path, name: str, value: object, data_start: int, size: int) -> Entry:
    what = f"{path}: tensor {short_repr(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadModelFile(f"{what} is {short_repr(value)}; it must have exactly dtype, shape and data_offsets")
    dtype, shape = value["dtype"], value["shape"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise BadModelFile(f"{what} has the dtype {short_repr(dtype)}; the format has {', '.join(_BITS)}")
    _check_shape(what, shape)
    start, stop = _offsets(what, value["data_offsets"], size - data_start)
    bits = prod(shape) * _BITS[dtype]
    if bits != (stop - start) * 8:
        raise BadModelFile(
            f"{what} with shape {short_repr(shape)} as {dtype} takes {-(-bits // 8)} bytes, "
            f"but its data_offsets span {stop - start}"
        )
    return Entry(path, tuple(shape), dtype, data_start + start, stop - start)


def _check_shape(what: str, shape: object) -> None:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise BadModelFile(f"{what} has the shape {short_repr(shape)}; it must be a list of integers")
    if len(shape) > MAX_DIMS:
        raise BadModelFile(f"{what} has {len(shape)} dimensions; the limit is {MAX_DIMS}")
    # An empty tensor takes no bytes whatever its other dimensions, but torch multiplies them.
    if prod(max(n, 1) for n in shape) >= 1 << 60:
        raise BadModelFile(f"{what} has the shape {short_repr(shape)}, of more than 2^60 values")


def _offsets(what: str, offsets: object, limit: int) -> tuple[int, int]:
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise BadModelFile(f"{what} has data_offsets {short_repr(offsets)}; they must be two integers")
    start, stop = offsets
    if not 0 <= start <= stop <= limit:
        raise BadModelFile(
            f"{what} is at {short_repr(offsets)} of {limit} bytes of data; the file is truncated or its header is wrong"
        )
    return start, stop


def _refuse_overlaps(path: Path, entries: Mapping[str, Entry]) -> None:
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.nbytes and entry.offset < end:
            raise BadModelFile(
                f"{path}: tensor {short_repr(name)} starts at byte {entry.offset}, "
                f"inside tensor {short_repr(before)}, which ends at byte {end}"
            )
        if entry.nbytes:
            end, before = entry.offset + entry.nbytes, name
