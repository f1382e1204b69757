"""A model quantized on disk: a folder with compressed-tensors weights, or a GGUF file. Nothing half-written is left.

A folder is made of a folder: int8 or fp8 (e4m3) with a scale for each row, int4 with a float16 scale for 32 inputs;
embedding, output, routers and norms stay as they are. `write_gguf` writes GGUF files.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported
from headway.base.files import read_json
from headway.base.text import short_repr
from headway.models.config import ModelConfig, read_config
from headway.models.families.family import Cut, Each
from headway.models.files.blocks import FLOATS
from headway.models.files.encode import encode
from headway.models.files.quantized_folder import E4M3
from headway.models.files.safetensors import INDEX, SINGLE
from headway.models.files.weights import GgufWeights, Weights, open_weights
from headway.models.nested import text_config
from headway.models.quantized.folder_gguf import FolderAsGguf
from headway.models.quantized.gguf_keys import MetaItem
from headway.models.quantized.write_gguf import GGUF, sync, write_gguf, written
from headway.models.weights.load import LoadProgress
from headway.models.weights.roles import Roles
from headway.models.weights.shapes import layer_shapes

FOLDER = ("int8", "int4", "fp8")
GROUP = 32
LINEAR = ("q", "k", "v", "o", "gate", "up", "down", "expert_gate", "expert_up", "expert_down")
LINEAR += ("shared_gate", "shared_up", "shared_down", "q_down", "q_up", "kv_down")
LINEAR += ("mix_in", "mix_out", "mix_qkv", "mix_gate")
# What transformers calls the output, also where it has no tensor of its own, or another name in the files.
HEADS = ("lm_head",)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".py")  # files not copied
_LARGEST_COPY = 256 << 20


@dataclass(frozen=True)
class QuantizedModel:
    """What `quantize_model` has written."""

    path: Path
    to: str
    tensors: int  # quantized
    kept: int  # tensors of linear layers that a folder keeps as floats
    kept_bytes: int
    bytes_before: int
    bytes_after: int
    requantized: bool  # whether the source was quantized already


def quantize_model(
    source: Path,
    to: str,
    out: Path,
    progress: LoadProgress | None = None,
    *,
    vocabulary: Mapping[str, MetaItem] | None = None,
) -> QuantizedModel:
    """Write the model in `source` as `to` at `out`, which must not exist. `progress` counts tensors.

    `vocabulary` is the tokenizer for a GGUF file that is made of a folder, as its metadata.
    """
    if to not in FOLDER + GGUF:
        raise InvalidInput(
            f"--to is {short_repr(to)}; a folder takes {', '.join(FOLDER)}, a GGUF file {', '.join(GGUF)}; IQ kinds "
            "are read and not written"
        )
    if os.path.lexists(out):
        raise InvalidInput(f"{out} exists; nothing is overwritten: remove it, or choose another --out")
    if not out.absolute().parent.is_dir():
        raise InvalidInput(f"the folder {out.absolute().parent} does not exist; create it first")
    if not source.is_dir() and to in FOLDER:
        raise Unsupported(
            f"{source} is a GGUF file, and {to} is for folders; use --to {', '.join(GGUF)}, or the model's folder"
        )
    if to in GGUF and out.suffix.lower() != ".gguf":
        raise InvalidInput(f"--out is {out}; a GGUF file's name ends with .gguf")
    config = read_config(source)
    with open_weights(source) as weights:
        before = sum(weights.nbytes(name) for name in weights.names())
        requantized = any(weights.stored(name) not in FLOATS for name in weights.names())
        kept = set[str]()
        if isinstance(weights, GgufWeights):
            count = write_gguf(weights, to, out, progress)
        elif to in GGUF:
            count = write_gguf(FolderAsGguf(source, config, weights, vocabulary or {}), to, out, progress)
        else:
            chosen, kept = _linear_names(source, config, weights, to)
            count = _write_folder(source, weights, chosen, to, out, progress=progress)
        kept_bytes = sum(weights.nbytes(name) for name in kept)
    after = out.stat().st_size if out.is_file() else (out / SINGLE).stat().st_size
    return QuantizedModel(out, to, count, len(kept), kept_bytes, before, after, requantized)


# -- folders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NewTensor:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def _write_folder(
    source: Path, weights: Weights, chosen: set[str], to: str, out: Path, *, progress: LoadProgress | None
) -> int:
    plan = {name: _planned(weights, name, to if name in chosen else None) for name in weights.names()}
    with written(out) as folder:
        target = folder / "model"
        target.mkdir()
        _copy_files(source, target)
        config = dict(text_config(read_json(source / "config.json", required=True)))
        left = [n.removesuffix(".weight") for n in plan if n not in chosen and len(weights.shape(n)) == 2]
        config = {key: value for key, value in config.items() if key != "compression_config"}
        config["quantization_config"] = _quantization_config(to, sorted({*left, *HEADS}))
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        with (target / SINGLE).open("wb") as file:
            _write_header(file, [tensor for tensors in plan.values() for tensor in tensors])
            for done, name in enumerate(plan):
                for part in _bytes(weights, name, to if name in chosen else None):
                    file.write(part)
                if progress is not None:
                    progress(done + 1, len(plan))
            sync(file)
        try:
            os.rename(target, out)
        except OSError as error:
            raise InvalidInput(f"{out} cannot be written: {error.strerror}") from None
    return len(chosen)


def _linear_names(source: Path, config: ModelConfig, weights: Weights, to: str) -> tuple[set[str], set[str]]:
    """The tensors of linear layers: those that become `to`, [outputs, inputs] each, and those that it cannot hold."""
    roles = Roles.of(source, config, weights)
    roles.check()
    matrices: set[str] = set()
    others: set[str] = set()
    for i in range(config.layers):
        at = roles.layer(i)
        for role, shape in layer_shapes(config, i).items():
            if role not in LINEAR:
                continue
            match roles.part(role):
                case Each(name):
                    matrices |= {roles.claim(at + name.format(x), shape[1:]) for x in range(shape[0])}
                case Cut(name, whole) as part:
                    (matrices if _by_rows(part, config) else others).add(roles.claim(at + name, whole(config)))
                case part:
                    (matrices if len(shape) == 2 else others).add(roles.claim(roles.name(at, part), shape))
    chosen = {name for name in matrices if to != "int4" or weights.shape(name)[1] % GROUP == 0}
    kept = others | (matrices - chosen)
    if not chosen:
        raise Unsupported(
            f"{source} has no linear layer that a folder in {to} can hold: matrices that are stored transposed or "
            f"stacked cannot, nor in int4 inputs that are not groups of {GROUP}; use --to Q8_0, a GGUF file"
        )
    wide = sorted(name for name in kept if weights.stored(name) not in FLOATS)
    if wide:
        raise Unsupported(
            f"{source}: {wide[0]!r} is stored as {weights.stored(wide[0])}, and a folder in {to} would hold it as "
            f"floats, several times as large, as it would {len(wide) - 1} others; use --to Q8_0 or Q4_K_M, a GGUF file"
        )
    return chosen, kept


def _by_rows(part: Cut, config: ModelConfig) -> bool:
    """Whether a weight is rows of a matrix [outputs, inputs]; others are stacked, or stored as [inputs, outputs]."""
    whole = part.shape(config)
    if len(whole) != 2:
        return False
    inputs = part.take(np.broadcast_to(np.arange(whole[1]), whole), config)
    return inputs.shape[-1] == whole[1] and np.array_equal(inputs[0], np.arange(whole[1]))


def _planned(weights: Weights, name: str, to: str | None) -> list[_NewTensor]:
    shape, at = weights.shape(name), name.removesuffix("weight")
    if to is None:
        kind = weights.stored(name) if weights.stored(name) in FLOATS else "F32"
        return [_NewTensor(name, kind, shape, prod(shape) * {"F64": 8, "F32": 4}.get(kind, 2))]
    n, k = shape
    if to == "int4":
        return [
            _NewTensor(f"{at}weight_packed", "I32", (n, k // 8), n * k // 2),
            _NewTensor(f"{at}weight_scale", "F16", (n, k // GROUP), 2 * n * (k // GROUP)),
            _NewTensor(f"{at}weight_shape", "I64", (2,), 16),
        ]
    kind = "I8" if to == "int8" else "F8_E4M3"
    return [_NewTensor(name, kind, shape, n * k), _NewTensor(f"{at}weight_scale", "F32", (n, 1), 4 * n)]


def _bytes(weights: Weights, name: str, to: str | None) -> Iterator[bytes | memoryview]:
    """The bytes of what `_planned` lists."""
    if to is None:
        kind = weights.stored(name)
        yield weights.span(name).bytes().data if kind in FLOATS else encode("F32", weights.array(name))
        return
    values = weights.array(name)
    if not np.isfinite(values).all():
        raise Unsupported(f"the weight {name!r} has values that are not finite; {to} cannot hold them")
    if to == "int4":
        n, k = values.shape
        groups = values.reshape(n, -1, GROUP)
        scale = (np.abs(groups).max(2) / np.float32(7.5)).astype(np.float16)
        if not np.isfinite(scale).all():
            raise Unsupported(f"the weight {name!r} is too large for int4's float16 scales; use int8")
        step = np.where(scale > 0, scale.astype(np.float32), np.float32(1))[..., None]
        quants = (np.rint(groups / step).clip(-8, 7) + 8).astype(np.uint8).reshape(n, k)
        yield np.ascontiguousarray(quants[:, ::2] | (quants[:, 1::2] << 4)).tobytes()
        yield scale.tobytes()
        yield np.array([n, k], np.int64).tobytes()
        return
    top = np.float32(127 if to == "int8" else 448)
    scale = np.abs(values).max(1, keepdims=True) / top
    scaled = values / np.where(scale > 0, scale, np.float32(1))
    yield np.rint(scaled).clip(-127, 127).astype(np.int8).tobytes() if to == "int8" else _to_e4m3(scaled).tobytes()
    yield scale.astype(np.float32).tobytes()


def _to_e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest float8 e4m3, ties to the even one; magnitudes are at most 448."""
    table = E4M3[:127]  # from 0 to 448
    middle = (table[1:] + table[:-1]) / np.float32(2)
    size = np.minimum(np.abs(values), np.float32(448))
    low = np.searchsorted(middle, size, side="left")
    tie = (low < len(middle)) & (middle[np.minimum(low, len(middle) - 1)] == size) & (low % 2 == 1)
    return ((low + tie) | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def _quantization_config(to: str, left: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": 4 if to == "int4" else 8,
        "type": "float" if to == "fp8" else "int",
        "strategy": "group" if to == "int4" else "channel",
        "group_size": GROUP if to == "int4" else None,
        "symmetric": True,
        "dynamic": False,
    }
    form = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[to]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": form}},
        "ignore": left,
        "kv_cache_scheme": None,
    }


def _write_header(file: BinaryIO, tensors: list[_NewTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def _copy_files(source: Path, target: Path) -> None:
    """Config, tokenizer, chat template and license: what is not weights, nor code."""
    for path in sorted(source.iterdir()):
        weights = path.name.lower().endswith(_WEIGHTS) or path.name in (INDEX, "pytorch_model.bin.index.json")
        if path.is_file() and not weights and not path.name.startswith(".") and path.stat().st_size <= _LARGEST_COPY:
            shutil.copyfile(path, target / path.name)
