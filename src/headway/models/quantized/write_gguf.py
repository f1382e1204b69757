"""A GGUF file, made of one whose metadata is copied byte by byte, tokenizer included, or of a folder.

Names are llama.cpp's. Norms, routers and small tables stay as they are, and so does what is not a multiple of a block;
in files of 4 or 5 bits embedding and output have 8. A mix of K kinds gives more bits to what costs most: values, the
way down, and the output.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO

from headway.base.errors import InvalidInput
from headway.models.files.blocks import FLOATS
from headway.models.files.encode import ENCODABLE, encode
from headway.models.files.gguf import DEFAULT_ALIGNMENT, KINDS, TYPE_NUMBERS
from headway.models.files.weights import GgufWeights
from headway.models.quantized.folder_gguf import FolderAsGguf
from headway.models.quantized.gguf_keys import MetaItem
from headway.models.weights.load import LoadProgress

CHUNK = 1 << 22  # numbers of a tensor that are quantized at a time
# As llama.cpp numbers what a file mostly has.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
MIXES = {
    "Q2_K": 10,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "Q6_K": 18,
}
GGUF = (*ENCODABLE, *MIXES)
# What rows that are not whole blocks of 256 become.
NARROW = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Routers, convolutions, what recurrences decide by, and small tables, as llama.cpp keeps most of them.
_KEPT = ("ffn_gate_inp", "position_embd", "ssm_conv1d", "shortconv.conv", "ssm_ba", "ssm_alpha", "ssm_beta")
_KEPT += ("rope_freqs", "sinks", "altup", "laurel", "per_layer_model_proj")


@contextmanager
def written(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` for what is being written; it is removed, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name[:100]}.", dir=out.absolute().parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync(file: BinaryIO) -> None:
    """All that was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_gguf(weights: GgufWeights | FolderAsGguf, to: str, out: Path, progress: LoadProgress | None) -> int:
    """Write the file `out`. Returns how many tensors changed their kind."""
    kinds = {name: _gguf_kind(weights, name, to) for name in weights.names()}
    pairs, alignment = _metadata(weights, to)
    sizes = {n: prod(weights.shape(n)) // KINDS[k].block * KINDS[k].nbytes for n, k in kinds.items()}
    with written(out) as folder:
        complete = folder / "model.gguf"
        with complete.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, len(kinds), len(pairs)))
            file.writelines(pairs)
            at = 0
            for name, kind in kinds.items():
                shape = weights.shape(name)[::-1]
                place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPE_NUMBERS[kind], at)
                file.write(_text(name) + place)
                at += sizes[name] + -sizes[name] % alignment
            for done, (name, kind) in enumerate(kinds.items()):
                file.write(b"\0" * (-file.tell() % alignment))
                for part in _gguf_bytes(weights, name, kind):
                    file.write(part)
                if progress is not None:
                    progress(done + 1, len(kinds))
            file.write(b"\0" * (-file.tell() % alignment))
            sync(file)
        try:
            os.link(complete, out)  # unlike a rename, it never overwrites
        except OSError as error:
            raise InvalidInput(f"{out} cannot be written: {error.strerror}") from None
    return sum(kind != weights.stored(name) for name, kind in kinds.items())


def _gguf_kind(weights: GgufWeights | FolderAsGguf, name: str, to: str) -> str:
    """What a tensor becomes: norms, routers and small tables stay as they are."""
    stored, shape = weights.stored(name), weights.shape(name)
    plain = len(shape) <= 1 or not name.endswith(".weight") or "norm" in name
    if plain or any(part in name for part in _KEPT):
        return stored
    tied = "output.weight" not in weights.names()
    outer = name in ("token_embd.weight", "output.weight")
    if to in MIXES:
        kind = "Q6_K" if name == "output.weight" or (outer and tied) else _mixed(to, name, _layers(weights))
    else:
        kind = "Q8_0" if outer and to.startswith(("Q4", "Q5")) else to
    if stored == "MXFP4" and kind not in FLOATS and _bits(kind) >= _bits(stored):
        return stored  # more bits would not say more
    width: int = shape[len(shape) - 1]
    if width % KINDS[kind].block:
        kind = NARROW.get(kind, kind)
    if width % KINDS[kind].block:
        return stored if stored in ENCODABLE else "F16"
    return kind


def _bits(kind: str) -> float:
    """Bits that a number takes."""
    return 8 * KINDS[kind].nbytes / KINDS[kind].block


def _layers(weights: GgufWeights | FolderAsGguf) -> int:
    matches = [re.match(r"blk\.(\d+)\.", name) for name in weights.names()]
    return max((int(match[1]) + 1 for match in matches if match), default=1)


def _mixed(to: str, name: str, layers: int) -> str:
    """The kind of a matrix in a mix: what carries values, and the way down, are worth more bits."""
    base = to[:4]
    match = re.match(r"blk\.(\d+)\.(attn_v|attn_qkv|attn_output|ffn_down)(_exps|_shexp)?\.", name)
    if match is None:
        return base
    layer, role = int(match[1]), match[2]
    eighth = layers // 8
    often = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    match to:
        case "Q2_K":
            return base if role == "attn_qkv" else "Q3_K"
        case "Q3_K_M":
            early = layer < 2 if role == "attn_v" else layer < layers // 16
            return "Q5_K" if early and role in ("attn_v", "ffn_down") else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "Q4_K_S":
            early = layer < 4 if role == "attn_v" else layer < eighth
            return "Q5_K" if early and role in ("attn_v", "ffn_down") else base
        case "Q4_K_M" | "Q5_K_M":
            return "Q6_K" if often and role in ("attn_v", "ffn_down") else base
    return base


def _gguf_bytes(weights: GgufWeights | FolderAsGguf, name: str, kind: str) -> Iterator[bytes | memoryview]:
    if kind == weights.stored(name) and isinstance(weights, GgufWeights):
        yield weights.span(name).bytes().data
        return
    if kind == "MXFP4" and isinstance(weights, FolderAsGguf):
        yield weights.fp4_blocks(name).tobytes()
        return
    values = weights.array(name)
    values = values.reshape(-1, values.shape[-1])
    rows = max(1, CHUNK // values.shape[1])
    for first in range(0, len(values), rows):
        yield encode(kind, values[first : first + rows])


def _metadata(weights: GgufWeights | FolderAsGguf, to: str) -> tuple[list[bytes], int]:
    """Every key with its value, in bytes, and the alignment of tensors."""
    own: dict[str, MetaItem] = {"general.file_type": (FILE_TYPES | MIXES)[to], "general.quantization_version": 2}
    if isinstance(weights, GgufWeights):
        pairs = [raw for key, raw in weights.file.raw_metadata() if key not in own]
        alignment = int(str(weights.file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)))
    else:
        pairs, alignment = [_pair(key, value) for key, value in weights.metadata.items()], DEFAULT_ALIGNMENT
    return pairs + [_pair(key, value) for key, value in own.items()], alignment


def _pair(key: str, value: MetaItem) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return _text(key) + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return _text(key) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return _text(key) + struct.pack("<If", 6, value)
    texts = [item for item in value if isinstance(item, str)]
    if texts:
        kind, items = 8, b"".join(map(_text, texts))
    elif all(isinstance(item, bool) for item in value):
        kind, items = 7, struct.pack(f"<{len(value)}?", *value)
    elif any(isinstance(item, float) for item in value):
        kind, items = 6, struct.pack(f"<{len(value)}f", *value)
    else:
        kind, items = 5, struct.pack(f"<{len(value)}i", *value)
    return _text(key) + struct.pack("<IIQ", 9, kind, len(value)) + items


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw
