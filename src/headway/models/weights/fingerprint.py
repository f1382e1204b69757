"""A strong hash of a model's weights: two models with the same fingerprint compute the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.arrays import from_tensor
from headway.models.any_decoder import AnyDecoder
from headway.models.quantized.cpu import QuantizedDecoder

CHUNK = 1 << 22


def fingerprint(path: Path | None, decoder: AnyDecoder, quantize: str | None = None) -> str:
    """SHA-256 over the weight files and their config, or over the tensors of a model created in memory."""
    digest = hashlib.sha256()
    if quantize is not None:
        digest.update(quantize.encode())
    if path is None and isinstance(decoder, QuantizedDecoder):
        digest.update(repr(decoder.config).encode())
        _hash(digest, decoder.arrays())
    elif path is None:
        _hash_decoder(digest, decoder)
    elif path.is_file():
        _hash_file(digest, path)
    else:
        for file in sorted([path / "config.json", *path.glob("*.safetensors")]):
            digest.update(file.name.encode())
            _hash_file(digest, file)
    return digest.hexdigest()


def _hash_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            digest.update(part)


def _hash_decoder(digest: hashlib._Hash, decoder: Any) -> None:
    from headway.models.described import DescribedDecoder
    from headway.models.layers import tensors_of

    digest.update(repr(decoder.config).encode())
    if isinstance(decoder, DescribedDecoder):
        _hash(digest, tensors_of(decoder))
        return
    # A quantized one has a dequantized `weight`, a rank's share its rows.
    embedding, output = (getattr(matrix, "weight", matrix) for matrix in (decoder.embedding, decoder.output))
    tensors = [embedding, decoder.final_norm, output, decoder.inv_freq]
    for layer in decoder.layers:
        tensors += [layer.input_norm, layer.mlp_norm]
        tensors += [t for t in (layer.q_norm, layer.k_norm) if t is not None]
        for part in (layer.qkv, layer.out, layer.gate_up, layer.down):
            tensors += [part.weight] if part.bias is None else [part.weight, part.bias]
    _hash(digest, tensors)


def _hash(digest: hashlib._Hash, tensors: list[Any]) -> None:
    for tensor in tensors:
        digest.update(np.ascontiguousarray(from_tensor(tensor)).view(np.uint8).data)
