"""Tensors among the inputs of tasks."""

from __future__ import annotations

from typing import Any


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor on the CPU."""
    from torch import Tensor

    return isinstance(value, Tensor) and value.device.type == "cpu"
