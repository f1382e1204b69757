"""Kernels in Triton, for CUDA devices. Each has a torch function of the same meaning beside it in `headway.kernels`.

Nothing here is imported unless a CUDA device is used: `missing` says whether it can be. With TRITON_INTERPRET=1 the
same kernels run on a CPU, slowly, which is how they are tested where there is no GPU.

The numbers of a step reach the kernels in one buffer of int32 (see `layout`): what varies from step to step lies in
device memory, so that a captured graph can be replayed for any batch of its size.
"""

from __future__ import annotations

from importlib.util import find_spec


def missing() -> str | None:
    """Why these kernels cannot run, in words, or None. Says nothing about the device."""
    if find_spec("triton") is not None:
        return None
    return "the package triton is not installed (it comes with torch's CUDA builds, or with `pip install triton`)"
