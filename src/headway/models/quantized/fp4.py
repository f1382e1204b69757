"""Matrices of experts that stay in MXFP4 on a device: 4-bit floats (E2M1), and a power of two for each 32 inputs.

They are stored as `mma` instructions need them, so that lanes exchange nothing: in strips of 16 outputs, cut in blocks
of 64 inputs, with four words for each of 32 lanes. Lane 4r + q has, of outputs r and r + 8 of its strip, eight inputs
of each group g: from 32g + 8q on. Its word 2g + t holds four of them, from 4t on: input 2p + i of output r + 8h is in
half i of the word, in place 2p + h. Three places are the bits of a bfloat16, sign and lowest exponents and highest
mantissa, moved down by 0, 3 and 6; the last has the bits that are left.

    bit     15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
    place    0   3   3   1   3   3   2   0   0   0   1   1   1   2   2   2
             s   s   m   s   e   e   s   e   e   m   e   e   m   e   e   m

A byte f stands for the power of two of a group: a number's bits in place, read as bfloat16, are the number times
2^-126; times the bfloat16 with exponent f they are the number times 2^(e - exponent - 127). Four blocks b have their
bytes together, [r, b, g, h].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.host.expert_form import FP4 as FORM
from headway.kernels.host.quantized import FP4, GROUP
from headway.models.layers import Linear

OUTPUTS, INPUTS = 16, 64  # of a block
TOGETHER = 4  # blocks that have their scales together
LARGEST = 128  # the largest e for which f is the exponent of a float
OFFSET = 126  # f - e, when no e is larger
SIGNS = (15, 12, 9, 14)  # the bits of each place, counted from 0
EXPONENTS = (7, 4, 1, 10)
MANTISSAS = (6, 3, 0, 13)


@dataclass(frozen=True, eq=False)
class Fp4Experts:
    """A matrix [N, K] for each of X experts, and their biases [X, N] or none; `dtype` is that of what is computed.

    A `gated` one, gate above up, has eight gates and their eight ups in each strip.
    """

    words: Tensor  # [X, S strips, C blocks of inputs, 128] int32
    scales: Tensor  # [X, S, ⌈C / 4⌉, 128] uint8: f = e + 126 - exponent, for 2^(e - 127)
    exponent: int
    bias: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, int]
    gated: bool
    label = "mxfp4 experts"
    form = FORM
    halves = None

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, gated: bool) -> Fp4Experts:
        """From codes [X, N, K / 2] uint8, two in a byte, the first in its low half, and scales [X, N, K / 32] uint8."""
        (_, n, half), exponent = codes.shape, max(0, int(scales.max()) - LARGEST)
        words = torch.stack([_words(one, gated=gated) for one in codes])  # one at a time: it is written more than once
        stored = (scales.int() + (OFFSET - exponent)).clamp(min=0).to(torch.uint8)
        groups = TOGETHER * INPUTS // GROUP
        lined = torch.stack([in_strips(one, groups, gated=gated) for one in stored]).unflatten(5, (TOGETHER, -1))
        lined = lined.permute(0, 1, 4, 3, 5, 6, 2).flatten(3).contiguous()  # of [X, S, h, r, C / 4, b, g]
        return cls(words, lined, exponent, bias, dtype, (n, 2 * half), gated)

    def dense(self) -> Linear:
        """The same as floats."""
        return Linear(torch.stack([self._floats(x) for x in range(len(self.words))]), self.bias)

    def _floats(self, x: int) -> Tensor:
        """The matrix [N, K] of one expert."""
        doubled = torch.tensor(FP4, device=self.words.device) - FP4[0]  # of which the scale takes half
        values = doubled[_codes(self.words[x])]  # [S, h, r, C, g, 32]
        f = self.scales[x].unflatten(2, (8, TOGETHER, 2, 2)).permute(0, 5, 2, 1, 3, 4).flatten(3, 4)
        e = f[:, :, :, : values.shape[3]].double() + (self.exponent - OFFSET)
        values = values * torch.exp2(e - 128).float().unsqueeze(-1)
        return from_strips(values.flatten(3), self.shape, gated=self.gated).to(self.dtype)

    @property
    def weight(self) -> Tensor:
        """The matrices as floats [X, N, K]."""
        return self.dense().weight

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)


def in_strips(rows: Tensor, block: int, *, gated: bool) -> Tensor:
    """Rows [N, K] as [S, h, r, C, block], with zeros where there are none."""
    wide = F.pad(rows, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))
    if gated:
        halves = F.pad(wide.unflatten(0, (2, -1)), (0, 0, 0, 0, 0, -(len(rows) // 2) % 8))
        return halves.unflatten(1, (-1, 8)).transpose(0, 1)
    return F.pad(wide, (0, 0, 0, 0, 0, -len(rows) % OUTPUTS)).unflatten(0, (-1, 2, 8))


def from_strips(rows: Tensor, shape: tuple[int, int], *, gated: bool) -> Tensor:
    """Rows [N, K] of [S, h, r, K or more]."""
    n, k = shape
    if not gated:
        return rows.flatten(0, 2)[:n, :k]
    return torch.cat([rows[:, h].flatten(0, 1)[: n // 2, :k] for h in range(2)])


def _words(codes: Tensor, *, gated: bool) -> Tensor:
    """The words [S, C, 128] of codes [N, K / 2]."""
    single = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    lined = in_strips(single, INPUTS, gated=gated)
    parts = lined.unflatten(4, (2, 4, 2, 2, 2)).permute(0, 3, 2, 5, 4, 6, 1, 7, 8)  # S, C, r, q, g, t, h, p, i
    words = torch.zeros(parts.shape[:6], dtype=torch.int32, device=codes.device)
    for place, at in _places():
        code = parts[..., place % 2, place // 2, at // 16].int()
        words |= (code >> 3) << (SIGNS[place] + at)
        words |= (code >> 1 & 3) << (EXPONENTS[place] + at) | (code & 1) << (MANTISSAS[place] + at)
    return words.flatten(2)


def _codes(words: Tensor) -> Tensor:
    """The codes [S, h, r, C, g, 32] int64 of words [S, C, 128]."""
    words = words.unflatten(2, (8, 4, 2, 2))  # S, C, r, q, g, t
    codes = words.new_empty(*words.shape, 2, 2, 2, dtype=torch.int64)
    for place, at in _places():
        sign, exponent = words >> SIGNS[place] + at & 1, words >> EXPONENTS[place] + at & 3
        code = sign << 3 | exponent << 1 | words >> MANTISSAS[place] + at & 1
        codes[..., place % 2, place // 2, at // 16] = code
    return codes.permute(0, 6, 2, 1, 4, 3, 5, 7, 8).flatten(5)


def _places() -> list[tuple[int, int]]:
    """Each place of each half of a word, and the half's first bit."""
    return [(place, at) for place in range(4) for at in (0, 16)]
