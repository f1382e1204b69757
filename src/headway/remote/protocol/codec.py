"""Messages as bytes: a JSON object, and the arrays in it as raw bytes behind it.

    frame    4 bytes, little endian: the length of the JSON · the JSON, UTF-8 · the arrays' bytes, one after the other
    array    {"array": [type, shape, offset, bytes]} in the JSON, its offset counted from the JSON's end

Pure functions, the same on both sides; `docs/protocol.md` describes them. Nothing is pickled, and nothing but JSON and
numbers comes out of `decode`.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from typing import Any

from headway.base.errors import InvalidInput
from headway.base.json_text import loads
from headway.base.system.lazy_numpy import has_numpy

VERSION = 1  # of the protocol; both sides must have the same
HEADER = 4  # bytes of the length before the JSON
TYPES = {  # of arrays: Python's code, and bytes of an element
    "<f4": ("f", 4),
    "<f8": ("d", 8),
    "<i4": ("i", 4),
    "<i8": ("q", 8),
    "<u4": ("I", 4),
    "|u1": ("B", 1),
    "|b1": ("B", 1),
}
_CODES = {"f": "<f4", "d": "<f8", "i": "<i4", "q": "<i8", "I": "<u4", "B": "|u1"}
DEPTH = 4  # dimensions of an array at most


class BadMessage(InvalidInput):
    """Bytes that are not a message of this protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as a frame."""
    blobs: list[bytes] = []
    size = 0

    def blob(value: Any) -> dict[str, Any]:
        nonlocal size
        kind, shape, data = _raw(value)
        blobs.append(data)
        size += len(data)
        return {"array": [kind, list(shape), size - len(data), len(data)]}

    text = json.dumps(message, default=blob, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([len(text).to_bytes(HEADER, "little"), text, *blobs])


def decode(frame: bytes, *, bounded: bool = False) -> dict[str, Any]:
    """The message of a frame; raises `BadMessage`, if it is `bounded` also for one with too many values."""
    length = int.from_bytes(frame[:HEADER], "little")
    if len(frame) < HEADER + length:
        raise BadMessage(f"the frame has {len(frame)} bytes; its JSON alone should have {length}")
    return _parse(frame[HEADER : HEADER + length], memoryview(frame)[HEADER + length :], bounded)


def decode_text(text: str, *, bounded: bool = False) -> dict[str, Any]:
    """The message of a text frame, which has no arrays."""
    return _parse(text, memoryview(b""), bounded)


def _parse(text: bytes | str, blob: memoryview, bounded: bool) -> dict[str, Any]:
    taken = 0

    def hook(value: dict[str, Any]) -> Any:
        nonlocal taken
        if value.keys() != {"array"}:
            return value
        array = _array(value["array"], blob, taken)
        taken += value["array"][3]
        return array

    try:
        readable = text if isinstance(text, str) else text.decode()
        message = loads(readable, object_hook=hook, parse_constant=_no_constant, bounded=bounded)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the message is not valid JSON: {error}"[:200]) from None
    if not isinstance(message, dict):
        raise BadMessage("the message is not a JSON object")
    if taken != len(blob):
        raise BadMessage(f"{len(blob) - taken} bytes follow the last array of the message")
    return message


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _array(given: Any, blob: memoryview, expected: int) -> Any:
    """An array of a message; they lie in the order in which the JSON names them, without gaps."""
    match given:
        case [str(kind), list(shape), int(offset), int(size)] if kind in TYPES and len(shape) <= DEPTH:
            pass
        case _:
            raise BadMessage(f"{given!r:.80} does not describe an array; see docs/protocol.md")
    if not all(type(n) is int and 0 <= n <= len(blob) for n in shape):
        raise BadMessage(f"an array has the shape {shape!r:.80}")
    count = math.prod(shape)
    if offset != expected or size != count * TYPES[kind][1] or offset + size > len(blob):
        raise BadMessage(f"an array of {count} × {kind} lies at {offset} with {size} bytes, where {expected} is next")
    return _values(kind, shape, bytes(blob[offset : offset + size]))


def _values(kind: str, shape: list[int], data: bytes) -> Any:
    """numpy's where it is installed; otherwise an `array`, or a list of them by rows."""
    if has_numpy():
        import numpy

        return numpy.frombuffer(bytearray(data), kind).reshape(shape)
    values = array(TYPES[kind][0], data)
    if sys.byteorder == "big":
        values.byteswap()
    return _rows(values, shape)


def _rows(values: array[Any], shape: list[int]) -> Any:
    if len(shape) <= 1:
        return values
    each = math.prod(shape[1:])
    return [_rows(values[i * each : (i + 1) * each], shape[1:]) for i in range(shape[0])]


def _raw(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """The type, shape and little-endian bytes of an array."""
    if isinstance(value, array):
        if sys.byteorder == "big":
            value = value[:]
            value.byteswap()
        return _CODES[value.typecode], (len(value),), value.tobytes()
    if hasattr(value, "__array_interface__"):
        import numpy

        kind = numpy.dtype(value.dtype).newbyteorder("<").str
        if kind in TYPES:
            return kind, value.shape, numpy.ascontiguousarray(value, kind).tobytes()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def number(value: float) -> float | str:
    """A float for JSON, which has no infinities."""
    return value if math.isfinite(value) else str(value)


def as_number(value: Any) -> float:
    """What `number` was given."""
    if value in ("inf", "-inf", "nan") or (isinstance(value, int | float) and not isinstance(value, bool)):
        return float(value)
    raise BadMessage(f"{value!r:.80} is not a number")
