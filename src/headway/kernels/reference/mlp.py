"""Activations, and gated ones."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(x: Tensor, kind: str, *, exact: bool) -> Tensor:
    """silu, gelu or gelu_tanh of x. `exact` is as in `gated_silu`."""
    if not exact:
        return F.silu(x) if kind == "silu" else F.gelu(x, approximate="none" if kind == "gelu" else "tanh")
    match kind:
        case "silu":
            return x / (1 + torch.exp(-x))
        case "gelu":
            return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        case "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
            return x / (1 + torch.exp(-2 * inner))  # 0.5 × (1 + tanh y) is the sigmoid of 2y
    raise AssertionError(kind)


def gated_silu(gate_up: Tensor, *, exact: bool) -> Tensor:
    """silu(gate) * up for gate_up [R, 2F] → [R, F].

    `exact` writes silu in operations whose bits do not depend on an element's position in memory; torch's own
    silu treats the last few elements of a thread's share differently.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if exact:
        return gate / (1 + torch.exp(-gate)) * up
    return F.silu(gate) * up
