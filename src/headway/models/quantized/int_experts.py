"""Matrices of experts that stay integers of 4 or 8 bits on a device, with a scale and perhaps a minimum for each 16 or
32 inputs: what most kinds of GGUF files hold, number for number.

Words are in the order of `quantized.fp4`, in strips of 16 outputs and blocks of 64 inputs, four words for each of 32
lanes. In groups of 32 lane 4r + q has the same inputs as there; in groups of 16 it has four of each group: word 2g + t
those from 32g + 16t + 4q on. Of these inputs 2p + i

    int4    output r + 8h is at bit 4h + 8p + 16i of the word, for both outputs
    int8    output r is byte 2p + i of the word, output r + 8 that of the same word 128 further on

Scales of 256 inputs are together, in lines of 16 bytes for each r, those of outputs r and r + 8 beside each other;
lines of minima follow those of scales. Halves that steps are multiplied with are [r, (scale, minimum), h].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.kernels.host.expert_form import ExpertForm
from headway.kernels.host.quantized import GROUP
from headway.models.layers import Linear
from headway.models.quantized.fp4 import INPUTS, TOGETHER, from_strips, in_strips

SHARED = TOGETHER * INPUTS  # inputs whose scales are together, and that share what steps are multiplied with
ROOM = 2.0**12  # what the largest value is scaled to, or half of it
PLACES = [4 * h + 8 * p + 16 * i for h in range(2) for p in range(2) for i in range(2)]  # of 4 bits in a word


@dataclass(frozen=True, eq=False)
class GroupedMatrix:
    """A matrix [N, K] of uint8, which counts from `zero`; a scale and perhaps a minimum for each group of inputs.

    They are float16 [N, K / group], or steps int8 times float16 [N, K / 256].
    """

    quants: Tensor
    scale: Tensor
    steps: Tensor | None = None
    minimum: Tensor | None = None
    minimum_steps: Tensor | None = None
    zero: int = 0

    @classmethod
    def below(cls, parts: list[GroupedMatrix]) -> GroupedMatrix:
        """Matrices of one format, one below the other."""
        names = [f.name for f in fields(cls) if isinstance(getattr(parts[0], f.name), Tensor)]
        stacked = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(**stacked, zero=parts[0].zero)


@dataclass(frozen=True, eq=False)
class IntExperts:
    """A matrix [N, K] for each of X experts, and their biases [X, N] or none; `dtype` is that of what is computed.

    A `gated` one, gate above up, has eight gates and their eight ups in each strip. All scales and minima are times
    2^exponent.
    """

    form: ExpertForm
    words: Tensor  # [X, S strips, C blocks of inputs, 128] int32, of 8 bits [X, S, C, 2, 128]
    scales: Tensor  # [X, S, ⌈C / 4⌉, lines, 32] int32
    halves: Tensor | None  # [X, S, ⌈C / 4⌉, 32] float16
    exponent: int
    bias: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, int]
    gated: bool

    @property
    def label(self) -> str:
        return f"{self.form.kind} experts"

    @classmethod
    def of(
        cls, form: ExpertForm, matrices: Iterable[GroupedMatrix], dtype: torch.dtype, *, gated: bool, exponent: int = 0
    ) -> IntExperts:
        """The matrices of all experts, without biases."""
        packed, (n, k) = [], (0, 0)
        for matrix in matrices:  # one at a time: it is written more than once
            n, k = matrix.quants.shape
            packed.append(_packed(form, matrix, gated=gated))
        words, scales, halves = (list(parts) for parts in zip(*packed, strict=True))
        above = torch.stack(halves) if form.steps else None
        return cls(form, torch.stack(words), torch.stack(scales), above, exponent, None, dtype, (n, k), gated)

    @classmethod
    def quantize(cls, weight: Tensor, kind: Literal["int4", "int8"], *, gated: bool) -> IntExperts:
        """Floats [X, N, K] rounded to the nearest of the steps of each 32 inputs: of 16 around 0, the first of which is
        the value of largest magnitude, or of 255, the last of which is that magnitude."""
        k, largest = weight.shape[2], float(weight.abs().max())
        if k % GROUP:
            raise Unsupported(
                f"{kind} takes inputs in groups of {GROUP} and experts here have {k}; leave out quantize="
            )
        exponent = math.frexp(largest / ROOM)[1] if 0 < largest < math.inf else 0  # so that float16 has every scale
        form = ExpertForm(kind)
        matrices = (_rounded(w.float() * 2.0**-exponent, form) for w in weight)
        return cls.of(form, matrices, weight.dtype, gated=gated, exponent=exponent)

    def dense(self) -> Linear:
        """The same as floats."""
        return Linear(torch.stack([self._floats(x) for x in range(len(self.words))]), self.bias)

    def _floats(self, x: int) -> Tensor:
        """The matrix [N, K] of one expert."""
        quants = _quants(self.form, self.words[x])
        lines = self.scales[x].chunk(2, 2) if self.form.minimum else (self.scales[x],)
        each = [_lined(self.form, some) for some in lines]
        if self.halves is not None:
            halves = self.halves[x].float().unflatten(2, (8, 2, 2)).permute(3, 0, 4, 2, 1)  # what, S, h, r, C / 4
            each = [e * half.repeat_interleave(SHARED // self.form.group, 3) for e, half in zip(each, halves)]
        wide = [e.repeat_interleave(self.form.group, 3)[..., : quants.shape[3]] for e in each]
        values = (quants - self.form.zero) * wide[0]
        if self.form.minimum:
            values += wide[1]
        return from_strips(values * 2.0**self.exponent, self.shape, gated=self.gated).to(self.dtype)

    @property
    def weight(self) -> Tensor:
        """The matrices as floats [X, N, K]."""
        return self.dense().weight

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.words, self.scales, self.halves, self.bias) if t is not None)


def _rounded(weight: Tensor, form: ExpertForm) -> GroupedMatrix:
    """The nearest integers to floats [N, K]."""
    grouped = weight.unflatten(1, (-1, GROUP))
    far = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    scales = (far / -8 if form.kind == "int4" else far.abs() / 127).half()
    step, last = torch.where(scales != 0, scales.float(), 1), 2 * form.zero - 1
    quants = (torch.round(grouped / step) + form.zero).clamp(0, last).to(torch.uint8)
    return GroupedMatrix(quants.flatten(1), scales.squeeze(2), zero=form.zero)


def _packed(form: ExpertForm, matrix: GroupedMatrix, *, gated: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The words, scales and halves of one expert."""
    given = [(matrix.scale, matrix.steps), (matrix.minimum, matrix.minimum_steps)][: 1 + form.minimum]
    lines, halves = [], []
    for half, steps in given:
        assert half is not None
        lines.append(_lines(steps if steps is not None else half, form, gated=gated))
        halves.append(in_strips(half, 1, gated=gated).squeeze(4))  # S, h, r, C / 4
    words, scales = _words(form, matrix.quants + (form.zero - matrix.zero), gated=gated), torch.cat(lines, 2)
    if not form.steps:
        return words, scales, None
    if not form.minimum:
        halves.append(torch.zeros_like(halves[0]))
    return words, scales, torch.stack(halves, -1).permute(0, 3, 2, 4, 1).flatten(2).contiguous()


def _lines(values: Tensor, form: ExpertForm, *, gated: bool) -> Tensor:
    """Numbers [N, K / group] as [S, C / 4, lines, 32] int32."""
    lined = in_strips(values, SHARED // form.group, gated=gated).unflatten(4, (-1, 8 // values.element_size()))
    return lined.permute(0, 3, 4, 2, 5, 1).flatten(3).contiguous().view(torch.int32)  # S, C / 4, line, r, place, h


def _lined(form: ExpertForm, lines: Tensor) -> Tensor:
    """The numbers [S, h, r, K / group] float32 of lines."""
    numbers = lines.contiguous().view(torch.int8 if form.steps else torch.float16).float()
    return numbers.unflatten(3, (8, -1, 2)).permute(0, 5, 3, 1, 2, 4).flatten(3)


def _words(form: ExpertForm, quants: Tensor, *, gated: bool) -> Tensor:
    """The words of quants [N, K], in which 0 is `form.zero`."""
    parts = in_strips(quants, INPUTS, gated=gated)
    if form.group == 32:
        parts = parts.unflatten(4, (2, 4, 2, 2, 2)).transpose(5, 6)  # S, h, r, C, g, t, q, p, i
    else:
        parts = parts.unflatten(4, (2, 2, 4, 2, 2))
    if form.kind == "int8":
        stored = parts.permute(0, 3, 1, 2, 6, 4, 5, 7, 8).contiguous().flatten(3)  # S, C, h, r, q, g, t, p, i
        return stored.view(torch.int32)
    parts = parts.permute(0, 3, 2, 6, 4, 5, 1, 7, 8).flatten(6).int()  # S, C, r, q, g, t, (h, p, i)
    words = torch.zeros(parts.shape[:6], dtype=torch.int32, device=quants.device)
    for place, at in enumerate(PLACES):
        words |= parts[..., place] << at
    return words.flatten(2)


def _quants(form: ExpertForm, words: Tensor) -> Tensor:
    """The quants [S, h, r, C × 64] int32 of words."""
    if form.kind == "int8":
        parts = words.view(torch.uint8).unflatten(3, (8, 4, 2, 2, 2, 2)).int()  # S, C, h, r, q, g, t, p, i
        parts = parts.permute(0, 2, 3, 1, 5, 4, 6, 7, 8)  # S, h, r, C, g, q, t, p, i
    else:
        parts = torch.stack([words >> at & 15 for at in PLACES], -1).unflatten(3, (2, 2, 2))
        parts = parts.unflatten(2, (8, 4, 2, 2)).permute(0, 6, 2, 1, 4, 3, 5, 7, 8)  # of S, C, r, q, g, t, h, p, i
    return (parts if form.group == 32 else parts.transpose(5, 6)).flatten(3)
