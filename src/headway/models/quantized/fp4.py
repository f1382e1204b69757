"""Matrices of experts that stay in MXFP4 on a device: 4-bit floats (E2M1), and a power of two for each 32 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.quantized import FP4, GROUP
from headway.models.layers import Linear


@dataclass(frozen=True, eq=False)
class Fp4Experts:
    """A matrix [N, K] for each of X experts, and their biases [X, N] or none; `dtype` is that of what is computed."""

    codes: Tensor  # [X, N, K / 2] uint8, two numbers in a byte, the first in its low half
    scales: Tensor  # [X, N, K / 32] uint8: e, for 2^(e - 127)
    bias: Tensor | None
    dtype: torch.dtype
    label = "mxfp4 experts"

    def dense(self) -> Linear:
        """The same as floats."""
        doubled = torch.tensor(FP4, device=self.codes.device) - FP4[0]  # of which the scale takes half
        both = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(2)
        scale = torch.exp2(self.scales.double() - 128).float()
        weight = doubled[both.int()] * scale.repeat_interleave(GROUP, -1)
        return Linear(weight.to(self.dtype), self.bias)

    @property
    def weight(self) -> Tensor:
        """The matrices as floats [X, N, K]."""
        return self.dense().weight

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)
