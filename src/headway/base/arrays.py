"""Arrays without torch. numpy has no bfloat16: an array of uint16 holds the bits of bfloat16s.

A tensor of torch becomes an array by its own methods, so that nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

LINE = 64  # bytes of a cache line: a vector that crosses two takes two reads

FLOAT_NAMES = {
    np.dtype(np.float64): "float64",
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    np.dtype(np.uint16): "bfloat16",
}
STORED = {name: dtype for dtype, name in FLOAT_NAMES.items()}  # the array type of each float type


def empty(shape: int | Sequence[int], dtype: DTypeLike = np.float32, *, zero: bool = False) -> np.ndarray:
    """An array that begins at a cache line. Zeros take memory only where they are first written."""
    sizes, kind = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
    count = prod(sizes) * kind.itemsize
    raw = (np.zeros if zero else np.empty)(count + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + count].view(kind).reshape(sizes)


def numbers(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Whole numbers [N] int64; those of a range are not gone through one by one."""
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step, dtype=np.int64)
    return np.asarray(values, dtype=np.int64)


def joined_numbers(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """The whole numbers of all parts [N] int64. An array for each pays where they are long."""
    if sum(map(len, parts)) > 32 * len(parts):
        return np.concatenate([numbers(part) for part in parts])
    return np.array([*chain.from_iterable(parts)], dtype=np.int64)


def aligned(array: np.ndarray) -> np.ndarray:
    """The array itself, or a copy, contiguous and beginning at a cache line."""
    if array.flags.c_contiguous and array.ctypes.data % LINE == 0:
        return array
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def float_name(array: np.ndarray) -> str | None:
    """float32, bfloat16 and so on; None for an array that does not hold floats."""
    return FLOAT_NAMES.get(array.dtype)


def widen(array: np.ndarray) -> np.ndarray:
    """The numbers in float32, unchanged; a float64 is rounded."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def narrow(array: np.ndarray, name: str) -> np.ndarray:
    """Floats rounded to the float type of this name, half to even."""
    if FLOAT_NAMES.get(array.dtype) == name:
        return array
    if name != "bfloat16":
        with np.errstate(over="ignore"):
            return (widen(array) if array.dtype == np.uint16 else array).astype(STORED[name])
    bits = np.ascontiguousarray(widen(array)).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def unreadable(value: Any) -> str | None:
    """Why a value that may be a tensor cannot be read as an array, as in "it is …"; None if it can."""
    if not is_tensor(value):
        return None
    if value.is_meta:
        return "on the meta device, without numbers"
    layout = str(value.layout).removeprefix("torch.")
    return f"{layout}, not dense" if layout != "strided" else "quantized" if value.is_quantized else None


def from_tensor(tensor: Any) -> np.ndarray:
    """A tensor of torch, or an array, as an array; it shares memory with a tensor on the CPU."""
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    if "float8" in str(tensor.dtype):
        tensor = tensor.float()
    return tensor.numpy()
