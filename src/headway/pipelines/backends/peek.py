"""What a model is before it is loaded: for tasks that different kinds of models compute in different ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headway.base.errors import InvalidInput
from headway.base.files import read_json
from headway.models.hub.store import resolve


def model_type(model: Any) -> str:
    """The family of a model that is not loaded yet, or is in memory."""
    return str(config_of(model).get("model_type", "unknown"))


def config_of(model: Any) -> Mapping[str, Any]:
    """The config of a module in memory, or the config.json of what a name stands for."""
    if isinstance(model, torch.nn.Module):
        config = getattr(model, "config", None)
        return {"architectures": [type(model).__name__], "model_type": getattr(config, "model_type", "unknown")}
    if model is None:
        raise InvalidInput("this task has no default model; pass model=... (a folder, a name or a hub id)")
    path = resolve(model)
    return read_json(path / "config.json") if path.is_dir() else {}
