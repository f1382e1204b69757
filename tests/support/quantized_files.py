"""Folders with quantized weights: by the compressed-tensors package, and AWQ, GPTQ and fp8 by their published layouts.

Each writer returns the float weights that its integers and scales stand for, computed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Floats = dict[str, Tensor]


def with_weights(model: PreTrainedModel, floats: Floats) -> PreTrainedModel:
    """The model with these weights."""
    _, extra = model.load_state_dict({name: tensor.float() for name, tensor in floats.items()}, strict=False)
    assert not extra, extra
    return model


def compress(folder: Path, model: PreTrainedModel, **args: Any) -> Floats:
    """The model compressed by the compressed-tensors package; `args` say how weights are quantized. It is consumed."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    how = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=how)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        w: Tensor = module.weight.detach()
        n, k = w.shape
        match how.strategy:
            case "group":
                w = w.reshape(n, -1, how.group_size)
                low, high = w.amin(2), w.amax(2)
            case "block":
                rows, inputs = how.block_structure
                w = w.reshape(n // rows, rows, k // inputs, inputs)
                low, high = w.amin((1, 3)), w.amax((1, 3))
            case "channel":
                low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
            case _:
                low, high = w.amin()[None], w.amax()[None]
        scale, zero = calculate_qparams(low, high, how)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters() if _is_float(name)}


def _is_float(name: str) -> bool:
    return not name.endswith(("weight_scale", "weight_zero_point", "weight_shape", "weight_packed"))


Packer = Callable[[str, Tensor], tuple[Floats, Tensor]]


def write_folder(folder: Path, model: PreTrainedModel, how: dict[str, Any], pack: Packer) -> Floats:
    """The model with every linear layer's matrix but the head's packed: its tensors, and the floats they stand for."""
    model.save_pretrained(folder)
    weights, stored, floats = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in weights.items():
        if name.endswith("proj.weight"):
            tensors, floats[name] = pack(name.removesuffix("weight"), tensor)
            stored |= tensors
        else:
            stored[name] = floats[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return floats


def rounded(weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quants [N, K], float16 scales and zeros [N, G]; `groups` is the group of each input."""
    top, count = (1 << bits) - 1, int(groups.max()) + 1
    scales, zeros = [], []
    for g in range(count):
        own = weight[:, groups == g]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / top).clamp(min=1e-5).half()
        middle = torch.full_like(low, (top + 1) // 2)
        zeros.append(middle if symmetric else (-low / scale.float()).round().clamp(1, top))
        scales.append(scale)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    quants = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, top)
    return quants.to(torch.int64), scale, zero.to(torch.int64)


def words(values: Tensor, bits: int) -> Tensor:
    """Integers [R, C] in words of 32 bits [R, C · bits / 32], the first in the lowest bits."""
    parts = values.reshape(len(values), -1, 32 // bits)
    total = sum(parts[:, :, i] << (bits * i) for i in range(32 // bits))
    assert isinstance(total, Tensor)
    return (((total + (1 << 31)) % (1 << 32)) - (1 << 31)).to(torch.int32)


def gptq(bits: int = 4, group: int = 32, *, symmetric: bool = True, act_order: bool = False, offset: int = 1) -> Packer:
    """GPTQ: qweight packed over inputs, zeros less one over outputs."""

    def pack(at: str, weight: Tensor) -> tuple[Floats, Tensor]:
        groups = torch.arange(weight.shape[1]) // (group if group > 0 else weight.shape[1])
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(len(at)))]
        quants, scale, zero = rounded(weight, bits, groups, symmetric=symmetric)
        tensors = {
            f"{at}qweight": words(quants, bits).T,
            f"{at}qzeros": words(zero.T - offset, bits),
            f"{at}scales": scale.T,
            f"{at}g_idx": groups.to(torch.int32),
        }
        return tensors, scale.float()[:, groups] * (quants - zero[:, groups]).float()

    return pack


def awq(group: int = 32) -> Packer:
    """AWQ's gemm layout: packed over outputs, with columns 0 2 4 6 1 3 5 7 in a word."""

    def interleaved(values: Tensor) -> Tensor:
        return words(values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    def pack(at: str, weight: Tensor) -> tuple[Floats, Tensor]:
        groups = torch.arange(weight.shape[1]) // group
        quants, scale, zero = rounded(weight, 4, groups, symmetric=False)
        tensors = {
            f"{at}qweight": interleaved(quants.T),
            f"{at}qzeros": interleaved(zero.T),
            f"{at}scales": scale.T,
        }
        return tensors, scale.float()[:, groups] * (quants - zero[:, groups]).float()

    return pack


def fp8(block: tuple[int, int] | None = None) -> Packer:
    """fp8 with a scale for each block (`weight_scale_inv`, as in DeepSeek V3), or for the matrix (`weight_scale`)."""

    def pack(at: str, weight: Tensor) -> tuple[Floats, Tensor]:
        n, k = weight.shape
        rows, inputs = block or (n, k)
        scale = torch.zeros(-(-n // rows), -(-k // inputs))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                own = weight[i * rows : (i + 1) * rows, j * inputs : (j + 1) * inputs]
                scale[i, j] = own.abs().max() / 448
        spread = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(inputs, 1)[:, :k]
        quants = (weight / spread).to(torch.float8_e4m3fn)
        beside = {f"{at}weight_scale_inv": scale} if block else {f"{at}weight_scale": scale.reshape(())}
        return {f"{at}weight": quants, **beside}, quants.float() * spread

    return pack


def mxfp4(folder: Path, model: PreTrainedModel, seed: int = 0) -> Floats:
    """A GPT-OSS model with experts of random 4-bit floats, in the published layout. The floats are as transformers
    dequantizes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(seed)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    floats = dict(weights)
    for name in [n for n in weights if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, k, n = weights.pop(name).shape
        blocks = torch.randint(0, 256, (count, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, (count, n, k // 32), generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return floats
