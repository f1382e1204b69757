"""Random LoRA adapters by peft, over models of transformers: the reference, and the files that it saves."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import torch
from transformers import PreTrainedModel

from support.gguf_files import ARCHS, interleaved

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


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


def state_of(wrapped: peft.PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors as peft names them; without the base weights that it adds where a head has LoRA."""
    return peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)


def save_lora(folder: Path, wrapped: peft.PeftModel) -> Path:
    """The adapter as peft saves it."""
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@torch.no_grad()
def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    """The logits [T, V] of a sequence."""
    return model(torch.tensor([tokens])).logits[0].float().numpy()


def write_gguf_lora(path: Path, wrapped: peft.PeftModel, *, alpha: float, **metadata: str) -> Path:
    """The adapter as llama.cpp's converter writes it: names of the gguf package, rows of q and k as in its models."""
    config = wrapped.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", arch))
    writer.add_type(metadata.pop("type", gguf.GGUFType.ADAPTER))
    writer.add_string(gguf.Keys.Adapter.TYPE, metadata.pop("kind", "lora"))
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    table = gguf.get_tensor_name_map(ARCHS[arch], config.num_hidden_layers)
    for name, tensor in state_of(wrapped).items():
        module, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        target = table.get_name(module)
        assert target is not None, name
        rows = tensor.detach()
        if arch == "llama" and side == "B" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            rows = interleaved(rows, heads)
        writer.add_tensor(f"{target}.weight.lora_{side.lower()}", rows.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
