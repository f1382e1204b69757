"""One GGUF file: its metadata and the location of its tensors.

Owns the reading of the header: every length, count and offset is checked against the file before it is used. It never
maps a file itself (`mapped` does) or dequantizes (`dequant` does), and knows no model family.

    magic "GGUF" · version u32 · tensor count u64 · key count u64
    key count ×    name · value type u32 · value              (an array is: item type u32 · length u64 · items)
    tensor count × name · dims u32 · dim u64 × dims · type u32 · offset u64
    padding to general.alignment, then the tensors' bytes; offsets count from here
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, overload
from weakref import WeakValueDictionary

import numpy as np

from headway.base.closing import Closing
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, Closed, UnsupportedModel
from headway.base.system.gc_paused import gc_paused
from headway.base.text import short_repr
from headway.kernels.native.bpe import strings_size
from headway.models.files.mapped import Span, identified_map, unmap

VERSIONS = (2, 3)
MAX_HEADER = 128 << 20  # bytes; the largest vocabularies in use take about 10 MiB
MAX_VALUES = 1 << 23  # metadata values, array items included: bounds the memory of Python's objects
MAX_TENSORS = 1 << 18
MAX_NAME = 65_535  # bytes, the format's own limit for a key
MAX_DIMS = 4
ALIGNMENTS = (8, 65_536)  # powers of two between these
DEFAULT_ALIGNMENT = 32
MANY_STRINGS = 1024  # an array of as many stays as it lies

_SMALLEST_KEY = 8 + 1 + 4 + 1  # a one-letter name, a type, a one-byte value
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a tensor type stores its numbers: `block` values in `nbytes` bytes."""

    block: int
    nbytes: int


KINDS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        "F32": BlockFormat(1, 4),
        "F16": BlockFormat(1, 2),
        "BF16": BlockFormat(1, 2),
        "Q8_0": BlockFormat(32, 34),
        "Q4_0": BlockFormat(32, 18),
        "Q4_1": BlockFormat(32, 20),
        "Q5_0": BlockFormat(32, 22),
        "Q5_1": BlockFormat(32, 24),
        "Q2_K": BlockFormat(256, 84),
        "Q3_K": BlockFormat(256, 110),
        "Q4_K": BlockFormat(256, 144),
        "Q5_K": BlockFormat(256, 176),
        "Q6_K": BlockFormat(256, 210),
        "MXFP4": BlockFormat(32, 17),
        "IQ4_NL": BlockFormat(32, 18),
        "IQ4_XS": BlockFormat(256, 136),
        "TQ1_0": BlockFormat(256, 54),
        "TQ2_0": BlockFormat(256, 66),
        "IQ1_S": BlockFormat(256, 50),
        "IQ1_M": BlockFormat(256, 56),
        "IQ2_XXS": BlockFormat(256, 66),
        "IQ2_XS": BlockFormat(256, 74),
        "IQ2_S": BlockFormat(256, 82),
        "IQ3_XXS": BlockFormat(256, 98),
        "IQ3_S": BlockFormat(256, 110),
        "NVFP4": BlockFormat(64, 36),
    }
)

# Every tensor type of the format, so that an unsupported one is refused by name. The missing numbers are retired.
_TYPE_NAMES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"), 6)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"), 16)),
    **dict(enumerate(("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), 24)),
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
TYPE_NUMBERS: Mapping[str, int] = MappingProxyType({name: number for number, name in _TYPE_NAMES.items()})

_SCALARS = {  # value type → little-endian numpy type
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Strings(Sequence[str]):
    """Many strings as they lie in the file, checked to be UTF-8; they become Python's when one is asked for."""

    def __init__(self, raw: bytes, count: int) -> None:
        self.raw, self._length = raw, count
        self._items: list[str] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.tolist()[index]

    def tolist(self) -> list[str]:
        """All of them."""
        if self._items is None:
            self._items = [self.raw[start:stop].decode() for start, stop in self._places()]
        return self._items

    def _places(self) -> Iterator[tuple[int, int]]:
        stop = 0
        for _ in range(self._length):
            start = stop + 8
            stop = start + _U64.unpack_from(self.raw, stop)[0]
            yield start, stop


MetaValue = str | int | float | bool | list[str] | Strings | list[int] | list[float] | list[bool]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The location of one tensor. `shape` is in torch's order, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


class Header:
    """A file's metadata and the location of each tensor. Immutable."""

    def __init__(self, metadata: Mapping[str, MetaValue], tensors: Mapping[str, GgufTensor]) -> None:
        self.metadata: Mapping[str, MetaValue] = MappingProxyType(dict(metadata))
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(dict(tensors))


_headers: WeakValueDictionary[tuple[int, ...], Header] = WeakValueDictionary()  # headers in use, by file


class GgufFile(Closing):
    """An open GGUF file. Views from `raw` keep the memory map alive, so they may outlive `close()`."""

    def __init__(self, path: Path, data: mmap.mmap, header: Header) -> None:
        self.path, self.header = path, header
        self.metadata, self.tensors = header.metadata, header.tensors
        self._data: mmap.mmap | None = data

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map the file and check its whole header. Raises `ModelNotFound`, `BadModelFile` or `UnsupportedModel`.

        The header of a file that has not changed is not parsed again while another user holds it.
        """
        where = Path(path)
        data, identity = identified_map(where)
        try:
            header = _headers.get(identity)
            if header is None:
                header = _headers[identity] = Header(*_read_header(where, data))
        except BaseException:
            data.close()
            raise
        return cls(where, data, header)

    def raw(self, name: str) -> np.ndarray:
        """The tensor's stored bytes, uint8 `[nbytes]`: a view of a private map, so a write never reaches the file."""
        return self.span(name).bytes()

    def span(self, name: str) -> Span:
        """The location of the tensor's stored bytes."""
        if self._data is None:
            raise Closed(f"{self.path} is closed; open it again to read {name!r}")
        tensor = self.tensors.get(name)
        if tensor is None:
            raise BadModelFile(f"{self.path} has no tensor {name!r}; it has {len(self.tensors)} others")
        return Span(self._data, tensor.offset, tensor.nbytes)

    def raw_metadata(self) -> Iterator[tuple[str, bytes]]:
        """Every key, with the bytes of its name, type and value in the file, in order."""
        if self._data is None:
            raise Closed(f"{self.path} is closed; open it again to read its metadata")
        cursor = _Cursor(self.path, self._data)
        cursor.skip(16, "the header")
        for _ in range(cursor.count("the metadata key count", _SMALLEST_KEY, MAX_VALUES)):
            start = cursor.pos
            key = cursor.name("a metadata key")
            _read_value(cursor, "a metadata value")
            yield key, self._data[start : cursor.pos]

    def close(self) -> None:
        """Release the map, now or with the last view of it. Closing twice is fine."""
        data, self._data = self._data, None
        if data is not None:
            unmap(data)


def read_header(path: Path) -> Header:
    """The header of a file. While it is held, opening the file again does not parse it again."""
    with gc_paused(), GgufFile.open(path) as file:
        return file.header


class _Cursor:
    """A position in the header that never moves past its end. `what` names the field in errors."""

    __slots__ = ("data", "end", "path", "pos", "values")

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.pos = 0
        self.end = min(len(data), MAX_HEADER)
        self.values = 0

    def fail(self, message: str) -> NoReturn:
        raise BadModelFile(f"{self.path}: {message}")

    def past_end(self, what: str, stop: int) -> NoReturn:
        if self.end < len(self.data):
            self.fail(f"{what} reaches byte {stop} of the header; Headway reads headers of up to {MAX_HEADER} bytes")
        self.fail(f"{what} reaches byte {stop}, but the file ends at byte {self.end}; it is truncated or damaged")

    def skip(self, count: int, what: str) -> int:
        """Skip `count` bytes and return where they start."""
        start = self.pos
        if count > self.end - start:
            self.past_end(what, start + count)
        self.pos = start + count
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.skip(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.skip(8, what))[0]

    def count(self, what: str, smallest: int, limit: int) -> int:
        """A number of items that follow. Fails if the rest of the file could not hold them."""
        number = self.u64(what)
        if number > limit:
            self.fail(f"{what} is {number}; the limit is {limit}")
        if number * smallest > self.end - self.pos:
            self.past_end(f"{what} of {number}", self.pos + number * smallest)
        return number

    def name(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        if not 0 < length <= MAX_NAME:
            self.fail(f"{what} is {length} bytes long; names have 1 to {MAX_NAME} bytes")
        return self.text(what, length)

    def text(self, what: str, length: int) -> str:
        start = self.skip(length, f"{what}, {length} bytes long,")
        try:
            return self.data[start : self.pos].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason} at byte {start + error.start}")

    def spend(self, number: int, what: str) -> None:
        self.values += number
        if self.values > MAX_VALUES:
            self.fail(f"{what} brings the metadata to {self.values} values; the limit is {MAX_VALUES}")


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, MetaValue], dict[str, GgufTensor]]:
    cursor = _Cursor(path, data)
    _read_magic(cursor)
    # Both counts are checked before anything is allocated for them.
    tensor_count = cursor.count("the tensor count", 0, MAX_TENSORS)
    key_count = cursor.count("the metadata key count", _SMALLEST_KEY, MAX_VALUES)
    metadata = _read_metadata(cursor, key_count)
    if tensor_count * _SMALLEST_TENSOR > cursor.end - cursor.pos:
        cursor.past_end(f"the tensor count of {tensor_count}", cursor.pos + tensor_count * _SMALLEST_TENSOR)
    alignment = _alignment(cursor, metadata)
    tensors = _read_tensors(cursor, tensor_count, alignment)
    return metadata, _place(cursor, tensors, alignment)


def _read_magic(cursor: _Cursor) -> None:
    magic = cursor.data[cursor.skip(4, "the magic number") : cursor.pos]
    if magic != b"GGUF":
        cursor.fail(f"the magic number is {magic!r}, not b'GGUF'; this is not a GGUF file")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        cursor.fail(f"the version reads {version:#010x}: a big-endian file; convert it to little-endian first")
    if version not in VERSIONS:
        cursor.fail(f"GGUF version {version}; Headway reads versions {' and '.join(map(str, VERSIONS))}")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, MetaValue]:
    metadata: dict[str, MetaValue] = {}
    for index in range(count):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            cursor.fail(f"metadata key {short_repr(key)} appears twice")
        metadata[key] = _read_value(cursor, f"metadata {short_repr(key)}")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> MetaValue:
    cursor.spend(1, what)
    kind = cursor.u32(f"the type of {what}")
    if kind == _STRING:
        return cursor.text(what, cursor.u64(f"the length of {what}"))
    if kind == _ARRAY:
        return _read_array(cursor, what)
    return _read_scalars(cursor, what, kind, 1)[0]


def _read_array(cursor: _Cursor, what: str) -> list[str] | Strings | list[int] | list[float] | list[bool]:
    kind = cursor.u32(f"the item type of {what}")
    if kind == _ARRAY:
        cursor.fail(f"{what} is an array of arrays (item type {_ARRAY}); items must be numbers, booleans or strings")
    smallest = 8 if kind == _STRING else _scalar(cursor, what, kind).itemsize
    count = cursor.count(f"the length of {what}", smallest, MAX_VALUES)
    cursor.spend(count, what)
    return _read_strings(cursor, what, count) if kind == _STRING else _read_scalars(cursor, what, kind, count)


def _read_strings(cursor: _Cursor, what: str, count: int) -> list[str] | Strings:
    if count >= MANY_STRINGS:
        size = strings_size(np.frombuffer(cursor.data, np.uint8, cursor.end - cursor.pos, cursor.pos), count)
        if size is not None:  # otherwise what is wrong is found below
            start = cursor.skip(size, what)
            return Strings(cursor.data[start : cursor.pos], count)
    # A vocabulary has some 100,000 of these: the loop keeps to locals, and reports through the cursor only on failure.
    data, pos, end, length_at = cursor.data, cursor.pos, cursor.end, _U64.unpack_from
    items: list[str] = []
    for index in range(count):
        start = pos + 8
        pos = start + length_at(data, pos)[0] if start <= end else start
        if pos > end:
            cursor.past_end(f"{what} item {index}", pos)
        try:
            items.append(data[start:pos].decode())
        except UnicodeDecodeError as error:
            cursor.fail(f"{what} item {index} is not UTF-8: {error.reason} at byte {start + error.start}")
    cursor.pos = pos
    return items


def _read_scalars(cursor: _Cursor, what: str, kind: int, count: int) -> list[int] | list[float] | list[bool]:
    dtype = _scalar(cursor, what, kind)
    start = cursor.skip(count * dtype.itemsize, what)
    # A copy: a view of the map would keep it from closing while an error propagates.
    values = np.frombuffer(cursor.data[start : cursor.pos], dtype)
    if kind == _BOOL:
        if count and int(values.max()) > 1:
            cursor.fail(f"{what} holds the byte {int(values.max())} as a boolean; it must be 0 or 1")
        values = values.astype(np.bool_)
    return values.tolist()


def _scalar(cursor: _Cursor, what: str, kind: int) -> np.dtype:
    name = _SCALARS.get(kind)
    if name is None:
        cursor.fail(f"{what} has value type {kind}; the format has types 0 to {max(_SCALARS)}")
    return np.dtype(name)


def _alignment(cursor: _Cursor, metadata: Mapping[str, MetaValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    low, high = ALIGNMENTS
    if type(value) is not int or not low <= value <= high or value & (value - 1):
        cursor.fail(f"general.alignment is {short_repr(value)}; it must be a power of two from {low} to {high}")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for index in range(count):
        name = cursor.name(f"the name of tensor {index}")
        if name in tensors:
            cursor.fail(f"tensor {short_repr(name)} appears twice")
        tensors[name] = _read_tensor(cursor, name, alignment)
    return tensors


def _read_tensor(cursor: _Cursor, name: str, alignment: int) -> GgufTensor:
    what = f"tensor {short_repr(name)}"
    dims = cursor.u32(f"the dimension count of {what}")
    if not 1 <= dims <= MAX_DIMS:
        cursor.fail(f"{what} has {dims} dimensions; the format has 1 to {MAX_DIMS}")
    sizes = tuple(cursor.u64(f"dimension {i} of {what}") for i in range(dims))
    kind = _tensor_kind(cursor, what, cursor.u32(f"the type of {what}"))
    offset = cursor.u64(f"the offset of {what}")
    if offset % alignment:
        cursor.fail(f"{what} starts at offset {offset}, which is not a multiple of the alignment {alignment}")
    return GgufTensor(name, sizes[::-1], kind, offset, _nbytes(cursor, what, kind, sizes))


def _tensor_kind(cursor: _Cursor, what: str, number: int) -> str:
    name = _TYPE_NAMES.get(number)
    if name is None or name not in KINDS:
        known = f"{name} (type {number})" if name else f"the unknown type {number}"
        raise UnsupportedModel(
            f"{cursor.path}: {what} is stored as {known}; Headway reads {', '.join(KINDS)}; "
            "convert the model to one of these"
        )
    return name


def _nbytes(cursor: _Cursor, what: str, kind: str, sizes: tuple[int, ...]) -> int:
    block_format, size = KINDS[kind], len(cursor.data)
    if 0 in sizes:
        cursor.fail(f"{what} has the dimensions {sizes}; each must be at least 1")
    if sizes[0] % block_format.block:
        cursor.fail(f"{what} has rows of {sizes[0]} values, not a multiple of the {kind} block of {block_format.block}")
    nbytes = prod(sizes) // block_format.block * block_format.nbytes
    if nbytes > size:
        cursor.fail(f"{what} with dimensions {sizes} would take {nbytes} bytes as {kind}, but the file has {size}")
    return nbytes


def _place(cursor: _Cursor, tensors: dict[str, GgufTensor], alignment: int) -> dict[str, GgufTensor]:
    """Offsets from the start of the file. Fails for tensors that overlap or reach past its end."""
    data_start = -(-cursor.pos // alignment) * alignment
    size = len(cursor.data)
    last: GgufTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        start = data_start + tensor.offset
        stop = start + tensor.nbytes
        if stop > size:
            cursor.fail(
                f"tensor {short_repr(tensor.name)} ends at byte {stop}, but the file has {size} bytes; "
                "it is truncated or damaged: download it again"
            )
        if last is not None and start < last.offset + last.nbytes:
            cursor.fail(
                f"tensor {short_repr(tensor.name)} starts at byte {start}, inside tensor {short_repr(last.name)}, "
                f"which ends at byte {last.offset + last.nbytes}"
            )
        last = tensors[tensor.name] = GgufTensor(tensor.name, tensor.shape, tensor.kind, start, tensor.nbytes)
    return tensors
