"""Programmatic dependent launch: starting a kernel before the previous one has ended, where the device can.

A kernel launched `ahead` starts when the previous one has begun its last blocks. It first allows the next one to start
(`launch_next`), loads what no kernel computes, above all weights, and waits (`wait`) before it touches results of
previous kernels. All of its blocks wait, so whatever runs after it finds everything done.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def can_go_ahead(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 1 << 18
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def options(ahead: bool) -> dict[str, Any]:
    """Launch options; Triton's interpreter gets none."""
    return {"launch_pdl": True} if ahead else {}


@triton.jit
def launch_next(AHEAD: tl.constexpr):
    """Lets the next kernel start."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at, size):
    """Prefetches `size` bytes, a multiple of 16, to the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred p, q;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        setp.gt.and.s32 q, $2, 0, p;
        @q cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [at.to(tl.int64), tl.full((), 0, tl.int32) + size],
        tl.int32,
        False,
        1,
    )


@triton.jit
def wait(AHEAD: tl.constexpr):
    """Waits until the results of all previous kernels are visible."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()
