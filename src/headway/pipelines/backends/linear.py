"""Linear layers as encoders use them here: in the library's blocked layout, in 8 bits, or plainly.

A Product is made once from a weight and a bias, and computes x·Wᵀ + b, with an activation or a residual where asked.
8-bit products code each row of x by itself with one scale, so that a row never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.base.errors import Unsupported

if TYPE_CHECKING:
    from headway.kernels.native.library import ThreadPool

ROWS = 512  # the number of rows that blocked weights are laid out for


class Product(Protocol):
    """x [T, K] → [T, N]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def gelu(self, x: Tensor) -> Tensor:
        """The exact GELU of the product."""
        ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product and `residual`."""
        ...


Maker = Callable[[Tensor, Tensor | None], Product]


class Plain:
    """torch's own linear, on any device and in any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def gelu(self, x: Tensor) -> Tensor:
        return torch.ops.aten.gelu_(self(x))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)


class Blocked:
    """float32 on a CPU: weights reordered once for oneDNN, activation and residual in the same pass."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def gelu(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "gelu", [], "none")

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")


def round_rows(rows: int) -> int:
    """The next of a few numbers of rows, at most a sixteenth more.

    oneDNN makes and keeps code for every number of rows that it meets; a stream of batches would meet hundreds.
    """
    step = 16
    while rows > 16 * step * 2:
        step *= 2
    return -(-rows // step) * step


def can_block(weight: Tensor) -> bool:
    """Whether oneDNN serves this weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def float_product(weight: Tensor, bias: Tensor | None) -> Product:
    """The quickest product in the weight's own numbers."""
    return Blocked(weight, bias) if can_block(weight) else Plain(weight, bias)


class Int8Native:
    """8-bit products of the native library; a thread_pool of threads is shared by all products of a model."""

    def __init__(self, weight: Tensor, bias: Tensor | None, thread_pool: ThreadPool) -> None:
        from headway.kernels.native.matmul import linear
        from headway.kernels.reference.quantized import quantize_int8

        self._packed, self._thread_pool, self._linear = quantize_int8(weight, bias), thread_pool, linear

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(self._thread_pool, x, self._packed)

    def gelu(self, x: Tensor) -> Tensor:
        return torch.ops.aten.gelu_(self(x))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)


class Int8Torch:
    """The same numbers from torch's integer product, where there is no native library."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = weight.abs().amax(1) / 127
        codes = torch.round(weight / torch.where(scale > 0, scale, 1)[:, None]).clamp(-127, 127).to(torch.int8)
        self._codes, self._scale, self._bias = codes.t(), scale, bias

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        most = x.abs().amax(1, keepdim=True)
        step = torch.where(most > 0, most, 1) / 127
        codes = torch.round(x / step).to(torch.int8)
        y = torch.ops.aten._int_mm(codes, self._codes).float().mul_(self._scale).mul_(step)
        return y if self._bias is None else y.add_(self._bias)

    def gelu(self, x: Tensor) -> Tensor:
        return torch.ops.aten.gelu_(self(x))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)


def int8_maker(threads: int) -> Maker:
    """Makes 8-bit products: native where the library is there, torch's otherwise."""
    from headway.kernels.native.library import ThreadPool, open_library

    if open_library().calls is None:
        return Int8Torch
    thread_pool = ThreadPool(threads)
    return lambda weight, bias: Int8Native(weight, bias, thread_pool)


class QuantizedLinear(nn.Module):
    """An 8-bit product in the place of a linear layer."""

    def __init__(self, linear: nn.Linear, make: Maker) -> None:
        super().__init__()
        if linear.weight.device.type != "cpu" or linear.weight.dtype != torch.float32:
            raise Unsupported(
                f"int8 layers are for float32 on a CPU, not {linear.weight.dtype} on {linear.weight.device}; "
                'use device="cpu" and dtype="float32"'
            )
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = None  # some models look at the dtype of a layer's weight, if it has one
        self.product = make(linear.weight.data, linear.bias.data if linear.bias is not None else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, self.in_features)).unflatten(0, x.shape[:-1])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"
