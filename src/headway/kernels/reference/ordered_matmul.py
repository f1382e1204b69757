"""The matmul with quantized weights, in the order that `quantized` describes: what native code computes, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.quantized import FLOATS, GROUP, QuantizedMatrix
from headway.kernels.reference.ordered import fma_sum
from headway.kernels.reference.quantized import dequantize, quantized, stored_quants, stored_scales, tensor

ELEMENTS = 1 << 22  # of one intermediate


@dataclass(frozen=True, eq=False)
class OrderedMatrix:
    """A matrix [N, K] ready to be multiplied in the order its format fixes, with four bytes for each weight.

    weights [G, S, N] are integers, multiplied S at a time without rounding, or floats [K, 1, N]; scale and minimum are
    [G, N], or scale [N] for all inputs, which the sum is multiplied by.
    """

    weights: Tensor
    scale: Tensor | None
    minimum: Tensor | None
    bias: Tensor | None
    row_quantization: str | None
    nbytes: int  # of the matrix as it is stored

    @classmethod
    def of(cls, w: QuantizedMatrix) -> OrderedMatrix:
        scale = minimum = None
        if w.kind in FLOATS:
            weights = dequantize(w).t().contiguous()[:, None]
        elif w.kind == "int8":
            assert w.scales is not None
            weights, scale = _by_group(stored_quants(w).float() - w.zero, GROUP), tensor(w.scales)[: w.n]
        else:
            size, repeat = min(w.group, GROUP), max(1, w.group // GROUP)
            quants = stored_quants(w).float() - (0 if w.has_min else w.zero)
            weights = _by_group(F.pad(quants, (0, -w.k % GROUP)), size)
            scale, minimum = (
                None if t is None else t.t().repeat_interleave(repeat, 0)[: len(weights)].contiguous()
                for t in stored_scales(w)
            )
        return cls(weights, scale, minimum, None if w.bias is None else tensor(w.bias), w.row_quantization, w.nbytes)

    def stacked_with(self, other: OrderedMatrix) -> OrderedMatrix | None:
        """Both as one matrix, this one's outputs first; None if their formats differ."""
        pairs = [(getattr(self, name), getattr(other, name)) for name in ("weights", "scale", "minimum", "bias")]
        alike = all((a is None) == (b is None) for a, b in pairs) and self.weights.shape[:2] == other.weights.shape[:2]
        if self.row_quantization != other.row_quantization or not alike:
            return None
        weights, scale, minimum, bias = (None if a is None else torch.cat((a, b), -1) for a, b in pairs)
        assert weights is not None
        return OrderedMatrix(weights, scale, minimum, bias, self.row_quantization, self.nbytes + other.nbytes)

    def rows(self, own: slice) -> OrderedMatrix:
        """Some of its outputs."""
        parts = (self.scale, self.minimum, self.bias)
        scale, minimum, bias = (None if part is None else part[..., own] for part in parts)
        return OrderedMatrix(self.weights[..., own], scale, minimum, bias, self.row_quantization, self.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, K] float32 times the matrix → [R, N]."""
        share = max(1, ELEMENTS // self.weights[:, 0].numel())
        y = torch.cat([self._rows(rows) for rows in x.split(share)]) if len(x) else x.new_empty(0, self.outputs)
        return y if self.bias is None else y + self.bias

    @property
    def outputs(self) -> int:
        return self.weights.shape[-1]

    def _rows(self, x: Tensor) -> Tensor:
        if self.row_quantization is None:
            return fma_sum((len(x), self.outputs), zip(self.weights, x.t()[:, :, None], strict=True))
        quants, scales = quantized(x)
        assert self.scale is not None
        if self.scale.ndim == 1:
            dots = self._dots(quants.flatten(1))
            return fma_sum(dots.shape[1:], zip(dots, scales.transpose(0, 1), strict=True)) * self.scale
        size = self.weights.shape[1]
        scales = scales[:, :, 0].repeat_interleave(GROUP // size, 1)  # [R, G]
        totals = quants.flatten(1).unflatten(1, (-1, size)).sum(2) * scales
        return self._grouped(self._dots(quants.flatten(1)), scales.t(), totals.t())

    def _dots(self, quants: Tensor) -> Tensor:
        """The exact sums [G, R, N] of integers [R, K] times weights."""
        size = self.weights.shape[1]
        return torch.bmm(quants.unflatten(1, (-1, size)).transpose(0, 1), self.weights)

    def _grouped(self, dots: Tensor, scales: Tensor, totals: Tensor) -> Tensor:
        """Group after group, its sum [R, N] times both scales, then its minimum times the total of the inputs."""
        scale, minimum = self.scale, self.minimum
        assert scale is not None

        def factors() -> Iterator[tuple[Tensor, Tensor]]:
            for g, dot in enumerate(dots):
                yield dot, scale[g] * scales[g][:, None]
                if minimum is not None:
                    yield minimum[g], totals[g][:, None]

        return fma_sum(dots.shape[1:], factors())


def linear_reference(x: Tensor, w: QuantizedMatrix) -> Tensor:
    """x [R, k] float32 times the matrix → [R, n]: what the native matmul computes."""
    return OrderedMatrix.of(w)(x)


def _by_group(quants: Tensor, size: int) -> Tensor:
    """Integers [n, k] → [K / size, size, n], padded with zeros."""
    padded = F.pad(quants, (0, -quants.shape[1] % size))
    return padded.t().unflatten(0, (-1, size)).contiguous()
