"""Small numbers from the host to a device, without waiting for the work that the device has queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor. A copy from pageable memory would wait for everything launched before it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
