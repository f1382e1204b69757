"""Recurrences over the rows of sequences, each from a state to the next. All in float32.

N sequences of M rows each; a function returns its outputs and the states after the last row. Rows are taken in order,
one after the other, so that a sequence may be cut anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), in operations whose bits do not depend on an element's position in memory."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def short_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each channel's convolution over its last K rows: x [N, M, C], state [N, C, K - 1], weight [C, K] → [N, M, C]."""
    rows, taps = x.shape[1], weight.shape[1]
    line = torch.cat((state, x.transpose(1, 2)), -1)  # [N, C, K - 1 + M]
    total = line[..., :rows] * weight[:, :1]
    for k in range(1, taps):  # in one order, however many rows there are
        total = total + line[..., k : k + rows] * weight[:, k : k + 1]
    total = total if bias is None else total + bias[:, None]
    return total.transpose(1, 2), line[..., rows:]


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: q and k [N, M, H, Dk], v [N, M, H, Dv], decay and beta [N, M, H], state [N, H, Dk, Dv].

    At each row the state decays, what it holds for the key is moved towards the value, and the query reads it.
    """
    outputs = []
    for i in range(q.shape[1]):
        state = state * decay[:, i, :, None, None]
        held = (state * k[:, i, :, :, None]).sum(-2)  # [N, H, Dv]
        moved = (v[:, i] - held) * beta[:, i, :, None]
        state = state + k[:, i, :, :, None] * moved[:, :, None]
        outputs.append((state * q[:, i, :, :, None]).sum(-2))
    return torch.stack(outputs, 1), state


def state_space(x: Tensor, b: Tensor, c: Tensor, state: Tensor, *, step: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """A selective state space: x [N, M, H, P], b and c [N, M, G, S], step [N, M, H], rate [H], state [N, H, P, S].

    At each row a head's state decays by exp(step × rate), takes in step × x ⊗ b, and is read by c.
    """
    share = x.shape[2] // b.shape[2]
    outputs = []
    for i in range(x.shape[1]):
        read, write = (each[:, i].repeat_interleave(share, 1)[:, :, None] for each in (c, b))  # [N, H, 1, S]
        kept = torch.exp(step[:, i] * rate)[..., None, None]
        state = state * kept + (step[:, i, :, None] * x[:, i])[..., None] * write
        outputs.append((state * read).sum(-1))
    return torch.stack(outputs, 1), state
