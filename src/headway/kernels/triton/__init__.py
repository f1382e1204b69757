"""Kernels in Triton, for CUDA devices: paged attention, matmul, quantized weights, sampling, probes.

Each computes the same as a torch function in `headway.kernels.reference`. Nothing here is imported unless a CUDA
device is used; `missing` tells whether it can be. With TRITON_INTERPRET=1 the kernels run on a CPU, slowly, which is
how they are tested without a GPU.

A step's numbers reach the kernels in one int32 buffer (see `layout`). All that varies between steps is in device
memory, so that a captured CUDA graph can be replayed for any batch of its size.
"""

from __future__ import annotations

from importlib.util import find_spec


def missing() -> str | None:
    """Why these kernels cannot run, or None. Does not look at the device."""
    if find_spec("triton") is not None:
        return None
    return "the package triton is not installed (it comes with torch's CUDA builds, or with `pip install triton`)"
