"""Functions of arrays, called with tensors: for tests that compare the native path with torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from headway.base.arrays import from_tensor, is_tensor
from headway.kernels.host import quantized as host
from headway.kernels.host import rope
from headway.kernels.host import sampling as host_sampling
from headway.kernels.host.sampling import RowSampler
from headway.kernels.native import matmul
from headway.kernels.native import sampling as native_sampling
from headway.kernels.reference.quantized import tensor
from headway.models.quantized import repack


def to_arrays(value: Any) -> Any:
    """A tensor as an array, also inside of samplers, lists and tuples."""
    if is_tensor(value):
        return from_tensor(value)
    if isinstance(value, RowSampler):
        return replace(value, **{f.name: to_arrays(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, list | tuple):
        return type(value)(to_arrays(each) for each in value)
    return value


def to_tensors(value: Any) -> Any:
    """An array as a tensor, also inside of tuples."""
    if isinstance(value, tuple):
        return tuple(to_tensors(each) for each in value)
    return tensor(value) if isinstance(value, np.ndarray) else value


def with_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which takes and gives arrays, for tensors."""

    def call(*args: Any, **options: Any) -> Any:
        return to_tensors(function(*to_arrays(args), **{name: to_arrays(value) for name, value in options.items()}))

    return call


interleave_floats = with_tensors(host.interleave_floats)
interleave_groups = with_tensors(host.interleave_groups)
interleave_int8 = with_tensors(host.interleave_int8)
quantize_int4 = with_tensors(host.quantize_int4)
quantize_int8 = with_tensors(host.quantize_int8)
linear = with_tensors(matmul.linear)
dequantize_rows = with_tensors(matmul.dequantize_rows)
load_matrix = with_tensors(repack.load_matrix)
sample_native = with_tensors(native_sampling.sample)
frequencies = with_tensors(rope.frequencies)
sample_host = with_tensors(host_sampling.sample)
