"""Random LoRA adapters by peft, over models of transformers: the reference, and the files that it saves."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import PreTrainedModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_lora(model: PreTrainedModel, *, seed: int = 0, strength: float = 0.5, **config: Any) -> peft.PeftModel:
    """A copy of the model under a random adapter, on every linear layer unless `config` (of LoraConfig) says less."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ALL, "task_type": "CAUSAL_LM"} | config
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings))
    randomize(wrapped, seed, strength)
    return wrapped.eval()


@torch.no_grad()
def randomize(wrapped: peft.PeftModel, seed: int, strength: float = 0.5) -> None:
    """Weights that change a model by a good part of itself."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(wrapped.named_parameters()):
        if ".lora_" in name:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise * (strength if ".lora_B" in name else 1.0) / math.sqrt(tensor.shape[-1]))


def save_lora(folder: Path, wrapped: peft.PeftModel) -> Path:
    """The adapter as peft saves it."""
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@torch.no_grad()
def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    """The logits [T, V] of a sequence."""
    return model(torch.tensor([tokens])).logits[0].float().numpy()
