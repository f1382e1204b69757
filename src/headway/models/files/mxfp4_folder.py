"""A folder of safetensors whose experts are in MXFP4, as GPT-OSS is published, by the floats' names.

A weight `x` [X, K, N], a matrix for each of X experts, is stored as two tensors of bytes, output by output:

    x_blocks  [X, N, K / 32, 16]  floats of 4 bits (E2M1), two in a byte, the first in its low half
    x_scales  [X, N, K / 32]      e, for 2^(e - 127), which 32 inputs share

`array` and `load` give the floats, exact in float32; `row_parts` the quants and scales of some outputs. Types and
shapes are checked when the folder is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.arrays import empty
from headway.base.closing import Closing
from headway.base.errors import BadModelFile, Unsupported
from headway.kernels.host.quantized import FP4, GROUP
from headway.models.files.blocks import FLOATS, QuantizedParts
from headway.models.files.mapped import Span
from headway.models.files.weights import SafetensorsWeights

if TYPE_CHECKING:
    import torch

BLOCKS, SCALES = "_blocks", "_scales"
KIND = "MXFP4"


class Mxfp4Folder(Closing):
    """The weights of a folder. It closes `files`."""

    def __init__(self, files: SafetensorsWeights) -> None:
        self.files = files
        self._shapes: dict[str, tuple[int, int, int]] = {}  # of quantized weights [X, K, N]
        try:
            self._names = self._find()
        except BaseException:
            files.close()
            raise

    def names(self) -> Sequence[str]:
        return self._names

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is in MXFP4."""
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name) or self.files.shape(name)

    def stored(self, name: str) -> str:
        return KIND if name in self._shapes else self.files.stored(name)

    def nbytes(self, name: str) -> int:
        if name not in self._shapes:
            return self.files.nbytes(name)
        return self.files.nbytes(name + BLOCKS) + self.files.nbytes(name + SCALES)

    def span(self, name: str) -> Span:
        """The location of a weight, or of a quantized one's blocks."""
        return self.files.any_span(name + BLOCKS) if name in self._shapes else self.files.span(name)

    def array(self, name: str, dtype: str = "float32") -> np.ndarray:
        if name not in self._shapes:
            return self.files.array(name, dtype)
        assert dtype == "float32", dtype
        count, k, n = self._shapes[name]
        out = empty((count, k, n))
        for i in range(count):
            out[i] = _floats(self.row_parts(name, np.arange(i * n, (i + 1) * n))).T
        return out

    def load(self, name: str, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if name not in self._shapes:
            return self.files.load(name, dtype=dtype, device=device)
        import torch

        from headway.models.files.dequant import store

        out = torch.empty(self._shapes[name], dtype=dtype)
        try:
            store(out, torch.from_numpy(self.array(name)))
        except Unsupported as error:
            raise Unsupported(f"{self.files.folder}: tensor {name!r}, stored as {KIND}: {error}") from None
        return out.to(str(device))

    def row_parts(self, name: str, rows: np.ndarray) -> QuantizedParts:
        """The quants and scales of outputs, which are counted over all experts."""
        packed, scales = self.packed_rows(name, rows)
        quants = np.stack((packed & 15, packed >> 4), -1).reshape(len(rows), -1)
        return QuantizedParts(quants, scales, None, bits=4, group=GROUP, zero=FP4[0])

    def packed_rows(self, name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bytes and scales of outputs as they are stored, [n, K / 2] and [n, K / 32]."""
        _, k, _ = self._shapes[name]
        packed = self.files.any_span(name + BLOCKS).bytes().reshape(-1, k // 2)[rows]
        return packed, self.files.any_span(name + SCALES).bytes().reshape(-1, k // GROUP)[rows]

    def close(self) -> None:
        self.files.close()

    def _find(self) -> tuple[str, ...]:
        """The names of all weights; the quantized ones are checked."""
        files, known = self.files, frozenset(self.files.names())
        names: dict[str, None] = {}
        for name in files.names():
            at = name.removesuffix(BLOCKS).removesuffix(SCALES)
            if at == name or not {at + BLOCKS, at + SCALES} & known:
                if files.stored(name) not in FLOATS:
                    raise BadModelFile(
                        f"{files.folder}: tensor {name!r} is stored as {files.stored(name)}, not part of a weight "
                        "quantized as 'mxfp4'; the config and the weights do not match"
                    )
                names[name] = None
                continue
            if at in known:
                raise BadModelFile(f"{files.folder} has {at!r} both as floats and quantized")
            self._shapes[at] = self._shape(at, known)
            names[at] = None
        if not self._shapes:
            raise BadModelFile(
                f"{files.folder}: config.json says the weights are quantized as 'mxfp4', and no tensor is (a name that "
                f"ends in {BLOCKS}); the config and the weights do not match"
            )
        return tuple(names)

    def _shape(self, at: str, known: frozenset[str]) -> tuple[int, int, int]:
        for name in (at + BLOCKS, at + SCALES):
            if name not in known:
                raise BadModelFile(
                    f"{self.files.folder}: the weight {at!r} has no {name!r}, which weights quantized as 'mxfp4' need"
                )
            if self.files.stored(name) != "U8":
                raise BadModelFile(
                    f"{self.files.folder}: tensor {name!r} is stored as {self.files.stored(name)}; weights quantized "
                    "as 'mxfp4' need U8"
                )
        blocks, scales = self.files.shape(at + BLOCKS), self.files.shape(at + SCALES)
        if len(blocks) != 4 or blocks[3] != GROUP // 2 or scales != blocks[:3] or not prod(blocks):
            raise BadModelFile(
                f"{self.files.folder}: the blocks of {at!r} are {list(blocks)} and its scales {list(scales)}; weights "
                "quantized as 'mxfp4' need [experts, outputs, groups, 16] and [experts, outputs, groups]"
            )
        return blocks[0], blocks[2] * GROUP, blocks[1]


def _floats(parts: QuantizedParts) -> np.ndarray:
    """The numbers of quants [N, K] and their scales, in float32."""
    doubled = np.array(FP4, np.float32) - FP4[0]  # of which the scale takes half
    scale = np.ldexp(np.float32(1), parts.scale.astype(np.int32) - 128)
    return doubled[parts.quants] * np.repeat(scale, GROUP, 1)
