"""Linear layers for encoders: torch's own, oneDNN's blocked layout, or int8.

A LinearOp is created once from a weight and a bias, and computes x·Wᵀ + b, optionally with a fused activation or
residual. int8 ops quantize each 32 inputs of a row with their own scale, so that a row never depends on its neighbors.
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

ROWS = 512  # the number of rows that oneDNN's blocked weights are laid out for


class LinearOp(Protocol):
    """x [T, K] → [T, N]. Implementations override `gelu` and `plus` where they can fuse them."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def gelu(self, x: Tensor) -> Tensor:
        """The exact GELU of the output."""
        return torch.ops.aten.gelu_(self(x))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The output plus `residual`."""
        return self(x).add_(residual)


LinearFactory = Callable[[Tensor, Tensor | None], LinearOp]


class TorchLinear(LinearOp):
    """torch's own linear, on any device and in any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class OneDnnLinear(LinearOp):
    """float32 on a CPU: weights reordered once for oneDNN, with fused activation and residual."""

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
    """`rows` rounded up to one of a few sizes, at most a sixteenth more.

    oneDNN compiles and caches a kernel for every number of rows; a stream of batches would have hundreds.
    """
    step = 16
    while rows > 16 * step * 2:
        step *= 2
    return -(-rows // step) * step


def has_onednn(weight: Tensor) -> bool:
    """Whether oneDNN supports this weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def float_linear(weight: Tensor, bias: Tensor | None) -> LinearOp:
    """The fastest LinearOp in the weight's own dtype."""
    return OneDnnLinear(weight, bias) if has_onednn(weight) else TorchLinear(weight, bias)


class NativeInt8Linear(LinearOp):
    """int8 matmul of the native library; all layers of a model share a thread pool."""

    def __init__(self, weight: Tensor, bias: Tensor | None, thread_pool: ThreadPool) -> None:
        from headway.base.arrays import from_tensor
        from headway.kernels.host.quantized import quantize_int8
        from headway.kernels.native.matmul import linear

        own = None if bias is None else from_tensor(bias)
        self._quantized, self._thread_pool, self._linear = quantize_int8(from_tensor(weight), own), thread_pool, linear

    @property
    def nbytes(self) -> int:
        return self._quantized.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self._linear(self._thread_pool, x.detach().numpy(), self._quantized))


class TorchInt8Linear(LinearOp):
    """The same numbers to float rounding from torch, where there is no native library."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = weight.abs().amax(1) / 127
        quantized = torch.round(weight / torch.where(scale > 0, scale, 1)[:, None]).clamp(-127, 127).to(torch.int8)
        self._weight, self._scale, self._bias = quantized, scale, bias

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        from headway.kernels.reference.quantized import quantize_rows

        y = F.linear(quantize_rows(x, "groups"), self._weight.float()).mul_(self._scale)
        return y if self._bias is None else y.add_(self._bias)


def int8_factory(threads: int) -> LinearFactory:
    """Creates int8 ops: native if the library is available, else torch's."""
    from headway.kernels.native.library import ThreadPool, open_library

    if open_library().calls is None:
        return TorchInt8Linear
    thread_pool = ThreadPool(threads)
    return lambda weight, bias: NativeInt8Linear(weight, bias, thread_pool)


class QuantizedLinear(nn.Module):
    """An int8 LinearOp in place of an nn.Linear."""

    def __init__(self, linear: nn.Linear, make: LinearFactory) -> None:
        super().__init__()
        if linear.weight.device.type != "cpu" or linear.weight.dtype != torch.float32:
            raise Unsupported(
                f"int8 layers are for float32 on a CPU, not {linear.weight.dtype} on {linear.weight.device}; "
                'use device="cpu" and dtype="float32"'
            )
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = None  # some models read the dtype of a layer's weight, if it has one
        self.op = make(linear.weight.data, linear.bias.data if linear.bias is not None else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x.reshape(-1, self.in_features)).unflatten(0, x.shape[:-1])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"
