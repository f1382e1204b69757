"""Random adapters as PEFT folders, written without peft."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from headway.models.config import ModelConfig
from headway.testing import random_adapter


def saved_adapter(folder: Path, config: ModelConfig, *, seed: int, rank: int = 4) -> Path:
    """A random adapter for a model of this config, strong enough to change every text."""
    adapter = random_adapter(config, rank=rank, seed=seed, strength=2.0)
    tensors: dict[str, torch.Tensor] = {}
    for target, pair in adapter.pairs.items():
        for side, tensor in (("A", pair.a), ("B", pair.b)):
            tensors[f"base_model.model.model.{target}.lora_{side}.weight"] = torch.from_numpy(tensor)
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder
