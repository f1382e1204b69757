"""Weight files to a QuantizedDecoder, for the CPU's native step. Errors name a weight that is missing or misshapen.

`load_tensors` makes a Decoder of torch from the same files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.arrays import aligned
from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.kernels.host.quantized import LANES, QuantizedMatrix
from headway.kernels.native.library import ThreadPool
from headway.models.config import ModelConfig, read_config
from headway.models.families.family import Cut, Each
from headway.models.files.blocks import FLOATS, QuantizedParts
from headway.models.files.mxfp4_folder import Mxfp4Folder
from headway.models.files.quantized_folder import QuantizedFolder
from headway.models.files.weights import Weights, open_weights
from headway.models.quantized.cache import WeightCache, cache_key
from headway.models.quantized.cpu import (
    ALL_MATRICES,
    OUTER_MATRICES,
    OUTER_VECTORS,
    VECTORS,
    QuantizedDecoder,
    QuantizedLayer,
)
from headway.models.quantized.repack import float_matrix, load_matrix, parts_matrix
from headway.models.weights.roles import Roles
from headway.models.weights.rows import half_split
from headway.models.weights.shapes import Shapes, layer_shapes, model_shapes

FLOAT_ROLES = ("mix_beta", "mix_step", "altup_predict", "altup_correct")  # that `quantize` leaves as they are
LATENT_ROLES = ("q_down", "q_up", "kv_down", "key_up", "value_up")  # that have 8 bits at least
LoadProgress = Callable[[int, int], None]  # layers done, total layers


def load_quantized_model(
    path: Path,
    *,
    thread_pool: ThreadPool | None,
    keep: bool = True,
    quantize: str | None = None,
    progress: LoadProgress | None = None,
    cache: WeightCache | None = None,
) -> QuantizedDecoder:
    """The decoder for the CPU's native step, or for its torch reference, which has no thread pool.

    `keep` leaves each matrix in its stored type, else it becomes float32.

    `quantize` is for float matrices: int8, or int4 (with the embedding and the output in int8). `cache` keeps what
    repacking has made.
    """
    config, weights = read_config(path), open_weights(path)
    try:
        roles = Roles.of(path, config, weights)
        roles.check()
        if quantize is not None and keep:
            _check_floats(path, weights, quantize)
        key = None if cache is None else cache_key(path, weights, keep=keep, quantize=quantize)
        if cache is not None and key is not None and (kept := cache.load(key, config)) is not None:
            return kept
        decoder = _QuantizedReader(roles, thread_pool, keep, quantize).decoder(progress)
        if cache is not None and key is not None:
            cache.store(key, decoder)
        return decoder
    finally:
        weights.close()


def has_quantized(path: Path) -> bool:
    """Whether a model's file has quantized matrices."""
    with open_weights(path) as weights:
        return any(len(weights.shape(name)) >= 2 and weights.stored(name) not in FLOATS for name in weights.names())


def stored_dtype(path: Path) -> str | None:
    """The float type of the matrices in a model's files; None if they are quantized or of both half types.

    A few float32 matrices beside others, as routers of experts often are, do not change it.
    """
    with open_weights(path) as weights:
        kinds = {weights.stored(name) for name in weights.names() if len(weights.shape(name)) >= 2}
    kinds = kinds - {"F32"} or kinds
    return FLOATS.get(kinds.pop()) if len(kinds) == 1 else None


def _check_floats(path: Path, weights: Weights, quantize: str) -> None:
    """Raise if there is nothing to quantize: matrices quantized in the file stay as they are."""
    stored = {weights.stored(name) for name in weights.names() if len(weights.shape(name)) >= 2}
    if not stored & FLOATS.keys():
        raise Unsupported(
            f"quantize={quantize!r} is for float matrices, and {path.name} has only {', '.join(sorted(stored))}, "
            "which stay as they are; leave it out, or add dtype='float32' to dequantize them first"
        )


def folder_array(roles: Roles, role: str, shape: tuple[int, ...], at: str) -> np.ndarray:
    """The weight of a role in float32, as the folder has it; `at` goes before its name."""
    return _QuantizedReader(roles, None, keep=False, quantize=None)._array(role, shape, at, "float32")


def folder_fp4(roles: Roles, role: str, at: str) -> QuantizedParts | None:
    """The matrices of experts as a folder has them in MXFP4, one below the other; None for any other weight."""
    part, weights = roles.part(role), roles.weights
    if not isinstance(part, Cut) or not isinstance(weights, Mxfp4Folder) or not weights.is_quantized(at + part.name):
        return None
    return _QuantizedReader(roles, None, keep=True, quantize=None)._cut_parts(part, at, None)


def folder_vector(roles: Roles, role: str, shapes: Shapes, at: str) -> np.ndarray:
    """The same of a vector, as a decoder has it."""
    return _QuantizedReader(roles, None, keep=False, quantize=None).vector(role, shapes, at)


def _unit_norms(config: ModelConfig, layer: int) -> dict[str, np.ndarray]:
    """The weights of norms that have none in files: ones, in layers with a rope."""
    ropes = config.description.ropes
    if not config.qk_norm or config.description.qk_norm != "unit" or (ropes is not None and not ropes[layer].dim):
        return {}
    return {name: aligned(np.ones(config.head_dim, np.float32)) for name in ("q_norm", "k_norm")}


@dataclass(frozen=True, eq=False)
class _QuantizedReader:
    """Reads weights as `QuantizedMatrix`."""

    roles: Roles
    thread_pool: ThreadPool | None
    keep: bool
    quantize: str | None

    def decoder(self, progress: LoadProgress | None) -> QuantizedDecoder:
        c = self.roles.config
        shapes = model_shapes(c)
        embedding = self.matrix("embedding", shapes, "")
        layers = []
        for i in range(c.layers):
            layers.append(self.layer(i))
            if progress is not None:
                progress(i + 1, c.layers)
        output = embedding
        if "output" in shapes:
            output = self.matrix("output", shapes, "")
        elif "output_bias" in shapes:
            output = replace(embedding, bias=self.vector("output_bias", shapes, ""))
        outer: dict[str, Any] = {role: self.vector(role, shapes, "") for role in OUTER_VECTORS if role in shapes}
        outer |= {role: self.matrix(role, shapes, "") for role in OUTER_MATRICES if role in shapes}
        return QuantizedDecoder(
            config=c,
            embedding=embedding,
            layers=tuple(layers),
            final_norm=self.vector("final_norm", shapes, ""),
            output=output,
            inv_freq=self.roles.frequencies(),
            **outer,
        )

    def layer(self, i: int) -> QuantizedLayer:
        shapes, at = layer_shapes(self.roles.config, i), self.roles.layer(i)
        parts: dict[str, Any] = {role: self.vector(role, shapes, at) for role in VECTORS if role in shapes}
        parts |= {role: self.matrix(role, shapes, at) for role in ALL_MATRICES if role in shapes}
        parts |= _unit_norms(self.roles.config, i)
        return QuantizedLayer(**parts)

    def vector(self, role: str, shapes: Shapes, at: str) -> np.ndarray:
        """A weight in float32, contiguous; norm weights never count from 1."""
        values = self._array(role, shapes[role], at, "float32")
        from_one = self.roles.config.description.norm == "rms+1" and role.endswith("_norm") and role != "mix_norm"
        return aligned(values + np.float32(1) if from_one else values)

    def matrix(self, role: str, shapes: Shapes, at: str) -> QuantizedMatrix:
        """The matrix of a role in the interleaved layout, with its bias."""
        shape, part = shapes[role], self.roles.part(role)
        rows, bias = self._order(role, shape), None
        if f"{role}_bias" in shapes:
            bias = self._array(f"{role}_bias", shapes[f"{role}_bias"], at, "float32").ravel()
            bias = bias if rows is None else bias[rows]
        how: dict[str, Any] = {
            "thread_pool": self.thread_pool,
            "keep": self.keep,
            "quantize": self._how(role),
            "bias": bias,
        }
        if isinstance(part, Cut) and self.roles.gguf:  # matrices stay quantized: some rows of one
            whole = part.shape(self.roles.config)
            own = part.take(np.arange(prod(whole[:-1])).reshape(whole[:-1]), self.roles.config).ravel()
            name = self.roles.claim(at + part.name, whole)
            return load_matrix(self.roles.weights, name, rows=own if rows is None else own[rows], **how)
        if isinstance(part, Cut) and self.keep and (own := self._cut_parts(part, at, rows)) is not None:
            return parts_matrix([own], None, bias)
        if isinstance(part, Each) and self.keep and (parts := self._expert_parts(part, shape, at)):
            return parts_matrix(parts, rows, bias)
        if isinstance(part, Cut | Each):
            floats = self._array(role, shape, at, None if how["quantize"] is None else "float32").reshape(-1, shape[-1])
            return float_matrix(floats if rows is None else floats[rows], how["quantize"], bias)
        name = self.roles.claim(self.roles.name(at, part), shape)
        return load_matrix(self.roles.weights, name, rows=rows, **how)

    def _cut_parts(self, part: Cut, at: str, rows: np.ndarray | None) -> QuantizedParts | None:
        """The outputs of experts that are cut from a weight [X, K, N] in MXFP4, in this order."""
        whole, weights = part.shape(self.roles.config), self.roles.weights
        name = self.roles.claim(at + part.name, whole)
        if not isinstance(weights, Mxfp4Folder) or not weights.is_quantized(name):
            return None
        count, _, n = whole
        own = part.take(np.arange(count * n).reshape(count, 1, n), self.roles.config).ravel()
        return weights.row_parts(name, own if rows is None else own[rows])

    def _expert_parts(self, part: Each, shape: tuple[int, ...], at: str) -> list[QuantizedParts]:
        """The matrices of all experts, if the folder has them quantized in one format."""
        weights = self.roles.weights
        names = [self.roles.claim(at + part.name.format(i), shape[1:]) for i in range(shape[0])]
        if not isinstance(weights, QuantizedFolder) or not all(map(weights.keeps, names)):
            return []
        if len({weights.kept_format(name) for name in names}) > 1:
            return []
        return [parts for name in names if (parts := weights.parts(name)) is not None]

    def _order(self, role: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """The order of a matrix's rows, if it is not the file's: by halves of heads, or with padding after experts."""
        c = self.roles.config
        if role in ("q", "k") and c.interleaved_weights:
            return half_split(np.arange(shape[0]), c.head_dim, c.rope.dim)
        if len(shape) == 3 and shape[1] % LANES:
            count, n = shape[:2]
            padded = np.minimum(np.arange(-(-n // LANES) * LANES), n - 1)  # rows of padding are never read
            return (np.arange(count)[:, None] * n + padded).ravel()
        return None

    def _how(self, role: str) -> str | None:
        """What floats are quantized to. Every token passes through embedding and output, and what a router says
        decides, as do a recurrence's step and beta and shares of streams, and all heads read the same latent vector:
        they keep more precision."""
        if self.quantize is None or "router" in role or role in FLOAT_ROLES:
            return None
        return "int8" if role in ("embedding", "output", "token_inputs", *LATENT_ROLES) else self.quantize

    def _array(self, role: str, shape: tuple[int, ...], at: str, dtype: str | None) -> np.ndarray:
        """The weight of a role as floats, of the type that it is stored in unless one is asked for."""
        roles, part = self.roles, self.roles.part(role)

        def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
            name = roles.claim(name, shape)
            kind = roles.weights.stored(name)
            own = FLOATS[kind] if self.keep and kind in ("F16", "BF16") else "float32"
            return roles.weights.array(name, dtype or own).reshape(shape)

        if isinstance(part, Each):
            return np.stack([read(at + part.name.format(i), shape[1:]) for i in range(shape[0])])
        if isinstance(part, Cut):
            taken = part.take(read(at + part.name, part.shape(roles.config)), roles.config)
            assert taken.shape == shape, (role, taken.shape, shape)
            return taken
        return read(roles.name(at, part), shape)
