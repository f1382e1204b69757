"""A folder of safetensors whose matrices are quantized: fp8, AWQ, GPTQ and compressed-tensors, by the float's name.

A matrix `x.weight` is stored as several tensors:

    fp8     weight, float8 e4m3 [N, K]; weight_scale, or weight_scale_inv by blocks
    int8    weight, int8 [N, K]; weight_scale, weight_zero_point
    packed  weight_packed, words [N, K · bits / 32]; weight_scale [N, G]; weight_zero_point, words [N · bits / 32, G];
            weight_shape; weight_g_idx
    gptq    qweight, words [K · bits / 32, N]; scales [G, N]; qzeros, words [G, N · bits / 32]; g_idx [K]
    awq     qweight, words [K, N / 8]; scales [G, N]; qzeros [G, N / 8]; columns 0 2 4 6 1 3 5 7 in a word

`names` are the floats' names, `parts` the integers with their scales, if these say the same as the floats, to the bit;
`array` and `load` give the floats: scale × (quant - zero), in float32. Types, shapes and metadata are checked when the
folder is opened. Scales of activations in the files are not used: activations are as for every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.arrays import widen
from headway.base.closing import Closing
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, Unsupported
from headway.models.files.blocks import FLOATS, QuantizedParts, stored_floats
from headway.models.files.mapped import Span
from headway.models.files.quantization import WeightScheme
from headway.models.files.weights import SafetensorsWeights

if TYPE_CHECKING:
    import torch

# The tensor that holds a matrix, and those beside it.
_MAIN = {"fp8": "weight", "int8": "weight", "packed": "weight_packed", "gptq": "qweight", "awq": "qweight"}
_BESIDE = {
    "fp8": ("weight_scale", "weight_scale_inv"),
    "int8": ("weight_scale", "weight_zero_point"),
    "packed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "gptq": ("scales", "qzeros", "g_idx"),
    "awq": ("scales", "qzeros"),
}
_UNUSED = ("input_scale", "activation_scale", "input_zero_point")  # of activations
_TYPES = {"fp8": "F8_E4M3", "int8": "I8", "packed": "I32", "gptq": "I32", "awq": "I32"}
_SCALES = ("F32", "F16", "BF16")
_INTEGERS = {"I8": np.int8, "I32": np.int32, "I64": np.int64}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of 8 columns


@dataclass(frozen=True)
class _StoredMatrix:
    """One quantized matrix: what goes before its tensors' names, its shape, and which tensors it has."""

    at: str
    shape: tuple[int, int]
    has: frozenset[str]


class QuantizedFolder(Closing):
    """The weights of a folder by the names that floats would have. It closes `files`."""

    def __init__(self, files: SafetensorsWeights, scheme: WeightScheme) -> None:
        self.files, self.scheme = files, scheme
        self._matrices: dict[str, _StoredMatrix] = {}
        self._zeros: dict[str, bool] = {}  # whether matrices have zeros of their own, once known
        try:
            self._names = self._find()
        except BaseException:
            files.close()
            raise

    @property
    def folder(self) -> object:
        return self.files.folder

    def names(self) -> Sequence[str]:
        return self._names

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is one of the quantized matrices."""
        return name in self._matrices

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self._matrices.get(name)
        return self.files.shape(name) if matrix is None else matrix.shape

    def stored(self, name: str) -> str:
        return self.scheme.label if name in self._matrices else self.files.stored(name)

    def nbytes(self, name: str) -> int:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self.files.nbytes(name)
        return sum(self.files.nbytes(matrix.at + part) for part in matrix.has)

    def span(self, name: str) -> Span:
        """The location of a weight, or of a quantized matrix's integers."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self.files.span(name)
        return self.files.any_span(matrix.at + _MAIN[self.scheme.form])

    def array(self, name: str, dtype: str = "float32") -> np.ndarray:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self.files.array(name, dtype)
        assert dtype == "float32", dtype
        return self._floats(matrix)

    def load(self, name: str, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self.files.load(name, dtype=dtype, device=device)
        import torch

        from headway.models.files.dequant import store

        values = torch.from_numpy(self._floats(matrix))
        if dtype == torch.float32:
            return values.to(str(device))
        out = torch.empty(matrix.shape, dtype=dtype)
        try:
            store(out, values)
        except Unsupported as error:
            raise Unsupported(f"{self.files.folder}: tensor {name!r}, stored as {self.scheme.label}: {error}") from None
        return out.to(str(device))

    def keeps(self, name: str) -> bool:
        """Whether the integers of a quantized matrix, with their scales, say what its floats do, to the bit."""
        matrix, s = self._matrices.get(name), self.scheme
        if matrix is None or s.form == "fp8" or s.block is not None:
            return False
        group, scale = self._group(matrix), self.files.stored(matrix.at + self._scale_name(matrix))
        if group < matrix.shape[1] and (group < 16 or group & (group - 1)):  # the kernels' groups
            return False
        if group == 16 and self.scheme.bits == 8 and self._has_zeros(matrix):  # has no kernel
            return False
        # A minimum, scale × zero, is exact where a scale has at most 11 bits.
        return (not self._has_zeros(matrix) or scale != "F32") and self._in_order(matrix)

    def parts(self, name: str) -> QuantizedParts | None:
        """The integers and scales of a matrix that `keeps` says yes to; None for any other weight."""
        matrix = self._matrices.get(name)
        if matrix is None or not self.keeps(name):
            return None
        quants, scale, zeros, zero = self._read(matrix)
        bits, group, _ = self.kept_format(name)
        if group == 0:  # one scale for a row
            return QuantizedParts(quants, widen(scale), None, bits=bits, group=0, zero=zero)
        if zeros is None and group == 16:
            scale = np.repeat(widen(scale), -(-self._group(matrix) // 16), 1)[:, : -(-matrix.shape[1] // 16)]
        if zeros is None:
            return QuantizedParts(quants, scale, None, bits=bits, group=group, zero=zero)
        wide = widen(scale)
        return QuantizedParts(quants, wide, -wide * zeros.astype(np.float32), bits=bits, group=group)

    def kept_format(self, name: str) -> tuple[int, int, int]:
        """Of a matrix that is kept: bits, inputs in a group (0 for int8 by rows), bytes of a scale and minimum."""
        matrix = self._matrices[name]
        zeros, half = self._has_zeros(matrix), self.files.stored(matrix.at + self._scale_name(matrix)) == "F16"
        bits, k, group = 8 if self.scheme.bits == 8 else 4, matrix.shape[1], self._group(matrix)
        if group >= k:  # one scale for a row
            group = 0 if bits == 8 and not zeros else max(32, 1 << (k - 1).bit_length())
        if group and not zeros and not (half and group >= 32):  # float32 scales without zeros are for groups of 16
            return bits, 16, 4
        return bits, group, 8 if zeros else 2 if group else 4

    def close(self) -> None:
        self.files.close()

    # -- finding and checking ------------------------------------------------------------------------------------------

    def _find(self) -> tuple[str, ...]:
        """The names of all weights; the quantized ones are checked."""
        main, known = "." + _MAIN[self.scheme.form], frozenset(self.files.names())
        names: dict[str, None] = {}
        hidden: set[str] = set()
        for name in self.files.names():
            if name.endswith(main) and self.files.stored(name) == _TYPES[self.scheme.form]:
                at = name.removesuffix(main[1:])
                beside = frozenset(part for part in _BESIDE[self.scheme.form] if at + part in known)
                hidden |= {at + part for part in (*beside, *_UNUSED)} | {name}
                whole = _StoredMatrix(at, self._shape(at, beside), beside | {main[1:]})
                self._matrices[f"{at}weight"] = whole
                names[f"{at}weight"] = None
        if not self._matrices:
            raise BadModelFile(
                f"{self.files.folder}: config.json says the weights are quantized as {self.scheme.method!r}, and no "
                f"tensor is ({main[1:]} of type {_TYPES[self.scheme.form]}); the config and the weights do not match"
            )
        for name in known - hidden:
            if self.files.stored(name) not in FLOATS:
                raise BadModelFile(
                    f"{self.files.folder}: tensor {name!r} is stored as {self.files.stored(name)}, not part of a "
                    f"matrix quantized as {self.scheme.method!r}; the config and the weights do not match"
                )
        names |= dict.fromkeys(name for name in self.files.names() if name not in hidden)
        for name, matrix in self._matrices.items():
            if name in hidden and name in known and matrix.at + "weight" not in {matrix.at + p for p in matrix.has}:
                raise BadModelFile(f"{self.files.folder} has {name!r} both as floats and quantized")
        return tuple(names)

    def _shape(self, at: str, has: frozenset[str]) -> tuple[int, int]:
        """The shape [N, K] of a matrix, whose tensors are checked."""
        s, files = self.scheme, self.files
        main = at + _MAIN[s.form]
        stored = files.shape(main)
        if len(stored) != 2 or 0 in stored:
            raise BadModelFile(f"{files.folder}: tensor {main!r} has shape {list(stored)}; a matrix is needed")
        per_word = 32 // s.bits
        match s.form:
            case "awq":
                n, k = stored[1] * per_word, stored[0]
            case "gptq":
                n, k = stored[1], stored[0] * per_word
            case "packed":
                n, k = self._stored_shape(at, has)
                self._check(main, "I32", (n, -(-k // per_word)))
            case _:
                n, k = stored
        groups = 1 if s.group is None else -(-k // s.group)
        if s.group is not None and k % s.group and "g_idx" not in has:
            raise BadModelFile(
                f"{files.folder}: {main!r} has {k} inputs, which groups of {s.group} (config.json) do not divide"
            )
        self._check_beside(at, has, (n, k), groups, per_word)
        return n, k

    def _stored_shape(self, at: str, has: frozenset[str]) -> tuple[int, int]:
        if "weight_shape" not in has:
            raise BadModelFile(
                f"{self.files.folder}: {at + 'weight_packed'!r} has no {at + 'weight_shape'!r} beside it"
            )
        name = f"{at}weight_shape"
        if self.files.stored(name) not in ("I64", "I32") or self.files.shape(name) != (2,):
            raise BadModelFile(f"{self.files.folder}: tensor {name!r} must be two integers")
        n, k = (int(value) for value in self._integers(name))
        if not 1 <= n < 1 << 40 or not 1 <= k < 1 << 40:
            raise BadModelFile(f"{self.files.folder}: tensor {name!r} says [{n}, {k}]")
        return n, k

    def _check_beside(self, at: str, has: frozenset[str], shape: tuple[int, int], groups: int, per_word: int) -> None:
        s, (n, k) = self.scheme, shape
        allowed: dict[str, tuple[tuple[str, ...], list[tuple[int, ...]]]] = {}
        if s.form in ("gptq", "awq"):
            allowed["scales"] = _SCALES, [(groups, n)]
            allowed["qzeros"] = ("I32",), [(groups, -(-n // per_word))]
            allowed["g_idx"] = ("I32",), [(k,)]
        else:
            by_block = [] if s.block is None else [(-(-n // s.block[0]), -(-k // s.block[1]))]
            by_row = [(n, groups)] + ([(n,), (1,), (1, 1), ()] if groups == 1 and s.group is None else [])
            scales = by_block or by_row
            allowed["weight_scale"] = allowed["weight_scale_inv"] = _SCALES, scales
            words = (-(-n // per_word), groups)
            allowed["weight_zero_point"] = (("I32",), [words]) if s.form == "packed" else (("I8",), by_row)
            allowed["weight_g_idx"] = ("I32",), [(k,)]
        for part in has & allowed.keys():
            types, shapes = allowed[part]
            self._check(at + part, types, *shapes)
        needed = {"gptq": ("scales", "qzeros"), "awq": ("scales", "qzeros")}.get(s.form, ())
        missing = next((part for part in needed if part not in has), None)
        if s.form not in ("gptq", "awq") and not has & {"weight_scale", "weight_scale_inv"}:
            missing = "weight_scale"
        if s.form in ("packed", "int8") and not s.symmetric and "weight_zero_point" not in has:
            missing = "weight_zero_point"
        if missing is not None:
            raise BadModelFile(
                f"{self.files.folder}: the matrix {at + _MAIN[s.form]!r} has no {at + missing!r} beside it, which "
                f"weights quantized as {s.method!r} need"
            )
        g_idx = next((part for part in ("g_idx", "weight_g_idx") if part in has), None)
        if g_idx is not None and not ((values := self._integers(at + g_idx)).min() >= -1 and values.max() < groups):
            raise BadModelFile(
                f"{self.files.folder}: {at + g_idx!r} names group {int(values.max())}; there are {groups}"
            )

    def _check(self, name: str, types: str | tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        types = (types,) if isinstance(types, str) else types
        kind, shape = self.files.stored(name), self.files.shape(name)
        if kind not in types or shape not in shapes:
            needed = " or ".join(str(list(each)) for each in shapes)
            raise BadModelFile(
                f"{self.files.folder}: tensor {name!r} is {list(shape)} of {kind}; weights quantized as "
                f"{self.scheme.method!r} with this config need {needed} of {' or '.join(types)}"
            )

    # -- reading -------------------------------------------------------------------------------------------------------

    def _integers(self, name: str) -> np.ndarray:
        raw, dtype = self.files.any_span(name).bytes(), _INTEGERS[self.files.stored(name)]
        return raw.copy().view(dtype).reshape(self.files.shape(name))

    def _scale_name(self, matrix: _StoredMatrix) -> str:
        return next(p for p in ("scales", "weight_scale", "weight_scale_inv") if p in matrix.has)

    def _scales(self, matrix: _StoredMatrix) -> np.ndarray:
        """Scales as they are stored; bfloat16 as float32."""
        name = matrix.at + self._scale_name(matrix)
        kind = self.files.stored(name)
        values = stored_floats(kind, self.files.span(name).bytes(), self.files.shape(name))
        return values if kind == "F16" else widen(values)

    def _group(self, matrix: _StoredMatrix) -> int:
        return matrix.shape[1] if self.scheme.group is None else min(self.scheme.group, matrix.shape[1])

    def _has_zeros(self, matrix: _StoredMatrix) -> bool:
        """Whether zeros differ: a zero in the middle of the range is not stored."""
        if matrix.at not in self._zeros:
            zeros, zero = self._read_zeros(matrix)
            self._zeros[matrix.at] = zeros is not None and bool((zeros != zero).any())
        return self._zeros[matrix.at]

    def _read_zeros(self, matrix: _StoredMatrix) -> tuple[np.ndarray | None, int]:
        """Zeros, integers [N, G], or None; and the middle of the range."""
        s, at, n = self.scheme, matrix.at, matrix.shape[0]
        zero = 1 << (s.bits - 1)
        if s.form == "awq":
            return _awq_columns(self._integers(f"{at}qzeros")).T.astype(np.int32), zero
        if s.form == "gptq":
            zeros = _unpack(self._integers(f"{at}qzeros"), s.bits)[:, :n].T.astype(np.int32)
            return (zeros + s.zero_offset) & ((1 << s.bits) - 1), zero
        if "weight_zero_point" not in matrix.has:
            return None, zero
        stored = self._integers(f"{at}weight_zero_point")
        if s.form == "packed":
            return _unpack(np.ascontiguousarray(stored.T), s.bits)[:, :n].T.astype(np.int32), zero
        return _by_row(stored, n).astype(np.int32) + zero, zero

    def _order(self, matrix: _StoredMatrix) -> np.ndarray | None:
        """The group of each input, where it is not the next of every `group` inputs."""
        name = next((part for part in ("g_idx", "weight_g_idx") if part in matrix.has), None)
        if name is None:
            return None
        order = self._integers(matrix.at + name)
        plain = np.arange(matrix.shape[1]) // self._group(matrix)
        return None if (order < 0).all() or (order == plain).all() else order

    def _in_order(self, matrix: _StoredMatrix) -> bool:
        return self._order(matrix) is None

    def _read(self, matrix: _StoredMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
        """Quants, uint8 [N, K]; scales [N, G]; zeros, integers [N, G], or None and the one zero of all."""
        s, at, (n, k) = self.scheme, matrix.at, matrix.shape
        scale = self._scales(matrix)
        zeros, zero = self._read_zeros(matrix)
        if not self._has_zeros(matrix):
            zeros = None
        match s.form:
            case "awq":
                quants, scale = _awq_columns(self._integers(f"{at}qweight")).T, scale.T
            case "gptq":
                quants, scale = _unpack(np.ascontiguousarray(self._integers(f"{at}qweight").T), s.bits), scale.T
            case "packed":
                quants = _unpack(self._integers(f"{at}weight_packed"), s.bits)[:, :k]
            case _:
                quants = self._integers(f"{at}weight").view(np.uint8) + np.uint8(zero)
        scale = scale if s.block is not None else _by_row(scale, n)
        return np.ascontiguousarray(quants), np.ascontiguousarray(scale), zeros, zero

    def _floats(self, matrix: _StoredMatrix) -> np.ndarray:
        """The matrix in float32."""
        (n, k), s = matrix.shape, self.scheme
        if s.form == "fp8":
            raw = self.files.any_span(f"{matrix.at}weight").bytes().reshape(n, k)
            return _scaled_blocks(E4M3[raw], widen(self._scales(matrix)), s.block)
        quants, scale, zeros, zero = self._read(matrix)
        values = quants.astype(np.float32)
        scale = widen(scale)
        if s.block is not None:
            return _scaled_blocks(values - np.float32(zero), widen(self._scales(matrix)), s.block)
        order = self._order(matrix)
        if order is not None:
            values -= np.float32(zero) if zeros is None else zeros.astype(np.float32)[:, order]
            return values * scale[:, order]
        group = self._group(matrix)
        for g in range(scale.shape[1]):
            own = values[:, g * group : (g + 1) * group]
            own -= np.float32(zero) if zeros is None else zeros[:, g : g + 1].astype(np.float32)
            own *= scale[:, g : g + 1]
        return values


def _scaled_blocks(values: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None) -> np.ndarray:
    """Values [N, K] times their scales: one, one for each row, or one for each block."""
    if block is None:
        values *= scale.reshape(-1, 1)
        return values
    rows, inputs = block
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            values[i * rows : (i + 1) * rows, j * inputs : (j + 1) * inputs] *= scale[i, j]
    return values


def _by_row(values: np.ndarray, n: int) -> np.ndarray:
    """One for each row and group, [N, G], of as many, of one for each row, or of one."""
    values = values.reshape(-1, 1) if values.ndim < 2 else values
    return np.broadcast_to(values, (n, values.shape[1])) if len(values) == 1 else values


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Words [R, W] → uint8 [R, W · 32 / bits], the lowest bits first."""
    raw = np.ascontiguousarray(words).view(np.uint8)  # [R, 4 W]
    if bits == 8:
        return raw
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((raw[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)


def _awq_columns(words: np.ndarray) -> np.ndarray:
    """Words [R, W] → uint8 [R, 8 W], the columns in order."""
    values = _unpack(words, 4).reshape(len(words), -1, 8)
    return values[:, :, list(_AWQ_ORDER)].reshape(len(words), -1)


def _e4m3() -> np.ndarray:
    """The float32 of every float8 e4m3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes < 128, values, -values).astype(np.float32)


E4M3 = _e4m3()
