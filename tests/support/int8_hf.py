"""What int8 weights mean, in transformers: rows of weights and groups of 32 inputs rounded to 8 bits, the rest floats.

Independent of the package under test: the oracle of `quantize="int8"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Routers, a recurrence's step and beta, convolutions and norms stay floats.
FLOATS = re.compile(r"router|\.gate\.weight$|in_proj_ba|in_proj_[ab]\.|shared_expert_gate|conv1d|conv\.conv|norm")
GROUP = 32


def rounded_rows(w: Tensor) -> Tensor:
    """Each row in 8 bits with its own scale, as floats."""
    scale = w.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (w / scale).round().clamp(-127, 127) * scale, w)


def rounded_groups(x: Tensor) -> Tensor:
    """Each 32 numbers of a row in 8 bits with their own scale, as floats."""
    wide = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    most = wide.abs().amax(-1, keepdim=True)
    quants = torch.where(most > 0, (wide * (127 / most)).round(), 0)
    return (quants * (most / 127)).flatten(-2)[..., : x.shape[-1]]


@contextmanager
def int8(model: Any) -> Iterator[Any]:
    """The model with int8 weights; it keeps them."""
    held = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not FLOATS.search(name):
                parameter.copy_(rounded_rows(parameter))
                held.add(parameter.untyped_storage().data_ptr())
    plain = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(rounded_groups(x) if weight.untyped_storage().data_ptr() in held else x, weight, bias)

    F.linear = linear  # type: ignore[assignment]
    try:
        yield model
    finally:
        F.linear = plain
