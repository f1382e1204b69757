"""How the matrices of experts that stay quantized on a device are stored, in a few words that kernels are made for."""

from __future__ import annotations

from typing import Literal

from headway.base.dataclass import dataclass


@dataclass(frozen=True)
class ExpertForm:
    """Floats of 4 bits (MXFP4) or integers of 4 or 8, and how many inputs share a scale.

    With `steps` a scale is a small integer times a float16 for 256 inputs, else it is a float16. With `minimum` a
    number is added, of the same form as the scale.
    """

    kind: Literal["fp4", "int4", "int8"]
    group: int = 32
    steps: bool = False
    minimum: bool = False

    @property
    def zero(self) -> int:
        """The integer that stands for 0."""
        return 128 if self.kind == "int8" else 0 if self.minimum else 8

    def strip_bytes(self, inputs: int) -> int:
        """The bytes of 16 outputs."""
        blocks, fours = -(-inputs // 64), -(-inputs // 256)
        lines = (2 if self.minimum else 1) * (1 if self.steps and self.group == 32 else 2)
        scales = 128 if self.kind == "fp4" else 128 * lines + (64 if self.steps else 0)
        return blocks * (1024 if self.kind == "int8" else 512) + fours * scales


FP4 = ExpertForm("fp4")
