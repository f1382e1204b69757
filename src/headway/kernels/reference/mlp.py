"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_silu(gate_up: Tensor, *, exact: bool) -> Tensor:
    """silu(gate) * up for gate_up [R, 2F] → [R, F].

    `exact` writes silu in operations whose bits do not depend on an element's position in memory; torch's own
    silu treats the last few elements of a thread's share differently.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if exact:
        return gate / (1 + torch.exp(-gate)) * up
    return F.silu(gate) * up
