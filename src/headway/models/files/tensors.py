"""Stored bytes as a tensor of torch, on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headway.base.errors import InvalidInput, Unsupported
from headway.models.files.dequant import FLOATS, as_floats, convert_floats, dequantize


def to_tensor(
    raw: np.ndarray, stored: str, shape: tuple[int, ...], what: str, *, dtype: torch.dtype, device: Any
) -> torch.Tensor:
    """A stored tensor as `dtype` on `device`; a view of its bytes if that is its type and place."""
    source = torch.from_numpy(raw)
    if dtype not in FLOATS.values():
        known = ", ".join(str(known).removeprefix("torch.") for known in FLOATS.values())
        raise InvalidInput(f"{what} cannot be loaded as {dtype}; weights load as one of {known}")
    device = torch.device(str(device))
    if FLOATS.get(stored) == dtype and device.type == "cpu":
        return as_floats(source, dtype).view(shape)
    out = torch.empty(shape, dtype=dtype, device=device)
    try:
        if stored in FLOATS:
            convert_floats(source, FLOATS[stored], out)
        else:
            dequantize(stored, source, shape, dtype, out)
    except Unsupported as error:
        raise Unsupported(f"{what}, stored as {stored}: {error}") from None
    return out
