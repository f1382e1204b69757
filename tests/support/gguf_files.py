"""GGUF files by the gguf package: whole models as llama.cpp's converter lays them out, and tensors of random blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from headway.models.files.dequant import FLOATS
from headway.models.files.gguf import KINDS
from support.hf import weights_of

ARCHS = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}

# Where each kind's blocks keep their float16 scales; the other bytes may hold anything.
HALVES = {
    **{"F32": (), "F16": (), "BF16": (), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,)},
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **{"IQ1_M": (), "NVFP4": ()},
}
# How large values of random blocks are, in units of the block's scale.
TYPICAL = {"Q2_K": 12, "Q3_K": 42, "Q4_K": 300, "Q5_K": 600, "Q6_K": 1400, "IQ4_NL": 60, "IQ4_XS": 1100}
TYPICAL |= {
    "IQ1_S": 6.5,
    "IQ1_M": 6.5,
    "IQ2_XXS": 50,
    "IQ2_XS": 50,
    "IQ2_S": 50,
    "IQ3_XXS": 120,
    "IQ3_S": 128,
    "NVFP4": 1,
}


def random_bytes(kind: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Stored bytes of a tensor with every bit pattern in the quants and finite scales, large, tiny and negative."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = torch.from_numpy(rng.standard_normal((rows, cols))).to(FLOATS[kind])
        return values.view(torch.uint8).numpy()
    packing = KINDS[kind]
    blocks = rng.integers(0, 256, (rows * cols // packing.block, packing.nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.standard_normal(len(blocks)) * 10.0 ** rng.integers(-7, 4, len(blocks))
        halves[:4] = [0.0, -0.0, 65504.0, -65504.0][: len(halves)]
        blocks[:, at : at + 2] = halves.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":  # a power of two, from 2^-28 to 2^15
        blocks[:, 0] = rng.integers(100, 144, len(blocks))
    if kind == "IQ1_M":  # the top bits of its float16, of which one is left out, so that it is finite
        blocks[:, 55] &= 0xBF
    return blocks.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]], **metadata: object) -> Path:
    """A GGUF file by the gguf package. Tensors are (kind, stored bytes [rows, bytes])."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    return path


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as the converter stores them for llama: each half-split pair side by side."""
    first, second = rows.unflatten(0, (heads, 2, -1)).unbind(1)
    return torch.stack((first, second), dim=2).flatten(0, 2)


def stored(name: str, tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """A checkpoint's tensor in the layout of its GGUF file."""
    config = model.config
    if config.model_type == "llama" and ".self_attn.q_proj." in name:
        return interleaved(tensor, config.num_attention_heads)
    if config.model_type == "llama" and ".self_attn.k_proj." in name:
        return interleaved(tensor, config.num_key_value_heads)
    return tensor


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: str | Callable[[str], str] = "F32",
    extra: dict[str, np.ndarray] | None = None,
    metadata: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """The model as a GGUF file: matrices in `kind` (or the one that it gives for the name in the file), norms and
    biases in F32, names by the gguf package's own table."""
    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    metadata(writer)
    table = gguf.get_tensor_name_map(ARCHS[arch], config.num_hidden_layers)
    for name, tensor in weights_of(model).items():
        target = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        chosen = "F32" if tensor.ndim != 2 else kind if isinstance(kind, str) else kind(target)
        data = blocks_of(stored(name, tensor, model).contiguous().numpy(), chosen)
        writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType[chosen])
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def blocks_of(values: np.ndarray, kind: str) -> np.ndarray:
    """Values stored as `kind`. The gguf package cannot quantize to K and IQ kinds: there, random blocks."""
    if kind not in TYPICAL:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    blocks = random_bytes(kind, *values.shape).reshape(-1, KINDS[kind].nbytes)
    scales = np.random.default_rng(0).uniform(0.5, 1.5, len(blocks)) * values.std() / TYPICAL[kind]
    halves = scales.astype(np.float16)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":  # in the top 4 bits of four words
        for i in range(4):
            blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 15) | (halves.view(np.uint16) >> 4 * i & 15) << 4
    if kind == "NVFP4":  # small floats of 8 bits
        blocks[:, :4] &= 7
    return blocks.reshape(len(values), -1)


@torch.no_grad()
def add_tensors(
    writer: gguf.GGUFWriter, names: gguf.TensorNameMap, tensors: Iterable[tuple[str, torch.Tensor]], kind: str
) -> None:
    """Tensors by their names in a folder, or by the file's own: matrices in `kind`, the rest in F32."""
    for name, tensor in tensors:
        target = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        wide = tensor.ndim >= 2 and tensor.shape[-1] % 32 == 0 and "norm" not in target and "conv" not in target
        chosen = kind if wide else "F32"
        values = tensor.float().contiguous().numpy()
        writer.add_tensor(target, blocks_of(values, chosen), raw_dtype=gguf.GGMLQuantizationType[chosen])


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file, whose keys and tensors are all there."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def round_weights(model: PreTrainedModel, kind: str) -> None:
    """Give every matrix the values that survive being stored in `kind`."""
    as_kind = gguf.GGMLQuantizationType[kind]
    for tensor in model.state_dict().values():
        if tensor.ndim == 2:
            tensor.copy_(
                torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), as_kind), as_kind))
            )
