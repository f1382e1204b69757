"""Launching a kernel before the one in front of it has ended, where the device can.

A kernel that is launched `ahead` starts when the one in front of it has begun its last blocks. It says at its own start
that the next one may come (`follow`), fetches what nobody computes, weights above all, and waits (`wait`) before it
touches what the kernels in front compute. All of its blocks wait, so whatever comes after it finds everything done.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def can_go_ahead(device: torch.device) -> bool:
    """Whether the device can start a kernel before the one in front of it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def shared_memory(device: torch.device) -> int:
    """Bytes of fast memory that a program may have."""
    if device.type != "cuda":
        return 1 << 18
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def options(ahead: bool) -> dict[str, Any]:
    """Launch options; no such word is said to Triton's interpreter."""
    return {"launch_pdl": True} if ahead else {}


@triton.jit
def follow(AHEAD: tl.constexpr):
    """The next kernel may start."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(at, size):
    """Bring so many bytes, a multiple of 16, to the second-level cache; nothing waits for them."""
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
    """What the kernels in front compute is there from here on."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()
