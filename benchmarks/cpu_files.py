"""The model files that engines are compared on: one random model of a shape, in every format, written once.

All of them hold the same float16 weights (`headway.bench.models`). GGUF files have every matrix in the type they
are named for, the embedding too, and the default model's tokenizer with made-up words behind its own where a shape has
more. A format that only a peer can write (Q4_K, OpenVINO's) is written by that peer's worker.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from headway.bench.models import FORMATS, ModelShape, sizes, tensors, write_folder
from headway.models.files.gguf import GgufFile, Strings
from headway.models.hub import store
from headway.models.weights.roles import GGUF_NAMES, HF_NAMES

PEERS = Path(__file__).parent / "peers"
TYPES = {
    "gguf-f32": gguf.GGMLQuantizationType.F32,
    "gguf-f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
UNUSED = 5  # the tokenizer's mark for words that are there to fill the table


class CannotWrite(LookupError):
    """This format needs a peer that was not given, or that could not write it."""


@dataclass(frozen=True)
class Files:
    """A folder of models; `pythons` are the interpreters of the peers."""

    folder: Path
    pythons: dict[str, str]
    threads: int

    def get(self, shape: ModelShape, form: str) -> Path:
        """The model of this shape in this format, written if it is not there."""
        suffix = "" if form in FORMATS or form.startswith("ov-") else ".gguf"
        path = self.folder / f"{shape.name}-{form}{suffix}"
        if path.exists():
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"partial-{path.name}")
        print(f"writing {path.name}", flush=True)
        self._writer(form)(shape, form, partial)
        return partial.rename(path)

    def _writer(self, form: str) -> Callable[[ModelShape, str, Path], Any]:
        if form in FORMATS:
            return lambda shape, form, path: write_folder(shape, path, form)
        if form in TYPES:
            return write_gguf
        if form.startswith("ov-"):
            return self._by_openvino
        return lambda shape, form, path: self.by_llama(self.get(shape, "gguf-f16"), form, path)

    def by_llama(self, source: Path, form: str, path: Path) -> None:
        """Quantize a GGUF file by llama.cpp."""
        self._tool("llama", "quantize", source=str(source), target=str(path), form=form, threads=self.threads)

    def _by_openvino(self, shape: ModelShape, form: str, path: Path) -> None:
        source = self.get(shape, "f16")
        self._tool("openvino", "export", folder=str(source), target=str(path), form=form.removeprefix("ov-"))

    def _tool(self, peer: str, tool: str, **options: Any) -> None:
        if peer not in self.pythons:
            raise CannotWrite(f"{options['form']} is written by {peer}, which was not given with --peer")
        command = [self.pythons[peer], str(PEERS / f"{peer}_worker.py"), tool, json.dumps(options)]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {"error": done.stderr[-400:]}
        if "error" in answer:
            raise CannotWrite(f"{peer} could not write {options['form']}: {answer['error']}")


def weight_bytes(path: Path) -> int:
    """Bytes of the tensors in a GGUF file or a folder of safetensors."""
    if path.is_dir():
        from headway.models.files.weights import open_weights

        with open_weights(path) as weights:
            return sum(weights.nbytes(name) for name in weights.names())
    with GgufFile.open(path) as file:
        return sum(tensor.nbytes for tensor in file.tensors.values())


def write_gguf(shape: ModelShape, form: str, path: Path) -> None:
    """A GGUF file of this shape, tensor by tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, shape)
    copy_tokenizer(writer, shape.vocab)
    for name, size in sizes(shape):
        kind = gguf.GGMLQuantizationType.F32 if len(size) == 1 else TYPES[form]
        stored = gguf.quant_shape_to_byte_shape(size, kind)
        writer.add_tensor_info(_gguf_name(name), stored, np.dtype(np.uint8), math.prod(stored), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in _stored(shape, form):
        writer.write_tensor_data(data)
    writer.close()


def _stored(shape: ModelShape, form: str) -> Iterator[np.ndarray]:
    """Every tensor as it is stored: norms in float32, matrices in the form's type."""
    for name, tensor in tensors(shape):
        if tensor.ndim == 1:
            yield tensor.float().numpy()
            continue
        heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(name.split(".")[-2])
        rows = tensor if heads is None else _paired(tensor, heads)
        yield gguf.quants.quantize(rows.float().numpy(), TYPES[form])


def _paired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows for rotation of halves, reordered for rotation of neighboring pairs, as Llama's GGUF files have them."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[1] != "layers":
        role = next(role for role, known in HF_NAMES.items() if known == name)
        return GGUF_NAMES[role]
    inner = ".".join(parts[3:])
    role = next(role for role, known in HF_NAMES.items() if known.removesuffix(".weight") == inner)
    return f"{GGUF_NAMES['layer'].format(parts[2])}{GGUF_NAMES[role].removesuffix('.weight')}.weight"


def _describe(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    writer.add_name(f"random {shape.name}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)


def copy_tokenizer(writer: gguf.GGUFWriter, words: int) -> None:
    """The default model's tokenizer, with made-up words behind its own."""
    with GgufFile.open(store.resolve("smollm2")) as file:
        found = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.ggml.")}
    known = {key: list(value) if isinstance(value, Strings) else value for key, value in found.items()}
    tokens, kinds = (known.pop(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    if words < len(tokens):
        raise ValueError(f"a vocabulary of {words} words cannot hold the {len(tokens)} of the tokenizer")
    more = words - len(tokens)
    writer.add_array("tokenizer.ggml.tokens", [*tokens, *(f"<unused-{i}>" for i in range(more))])
    writer.add_array("tokenizer.ggml.token_type", [*kinds, *[UNUSED] * more])
    for key, value in known.items():
        match value:
            case list():
                writer.add_array(key, value)
            case bool():
                writer.add_bool(key, value)
            case str():
                writer.add_string(key, value)
            case int():
                writer.add_uint32(key, value)
            case _:
                raise ValueError(f"{key} is {value!r}; this writer does not know how to store it")
