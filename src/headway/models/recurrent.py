"""Recurrent layers: the weights of each kind, and the functions around its recurrence.

A mixer takes the place of attention. `project`, `finish` and `mix_out` treat every row alike; `advance` takes the rows
of sequences in order, each from a state to the next. A state is one flat row of float32 numbers: that of the
convolution, then that of the recurrence.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.lora import Delta, plus
from headway.kernels.reference.mlp import activate
from headway.kernels.reference.norm import rms_norm
from headway.kernels.reference.recurrent import gated_delta, short_conv, sigmoid, softplus, state_space
from headway.models.description import GatedDelta, Mamba2, ShortConv
from headway.models.layers import Linear


class Mixer(Protocol):
    """What a recurrent layer computes in place of attention, or beside it."""

    @property
    def mix_out(self) -> Linear:
        """The matrix to the residual."""
        ...

    def project(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor, ...]:
        """Rows h [R, E] → what `advance` takes [R, …], and then what `finish` takes besides its outputs."""
        ...

    def advance(self, rows: Tensor, state: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Rows [N, M, …] of N sequences from their states [N, S] on → outputs [N, M, …] and the states after them."""
        ...

    def finish(self, outputs: Tensor, *gate: Tensor, exact: bool) -> tuple[Tensor]:
        """Outputs [R, …] → what `mix_out` takes."""
        ...


@dataclass(frozen=True, eq=False)
class ShortConvMixer:
    """LFM2's: of three projections one is convolved, gated by the second before and by the third after."""

    what: ShortConv
    mix_in: Linear  # [3E, E]
    conv: Tensor  # [E, K]
    conv_bias: Tensor | None  # [E]
    mix_out: Linear  # [E, E]

    def project(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor]:
        return (plus(self.mix_in(h), delta),)

    def advance(self, rows: Tensor, state: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
        before, after, x = rows.float().chunk(3, -1)
        mixed, state = _convolved(before * x, state, self.conv, self.conv_bias)
        return after * mixed, state

    def finish(self, outputs: Tensor, *gate: Tensor, exact: bool) -> tuple[Tensor]:
        return (outputs,)


@dataclass(frozen=True, eq=False)
class GatedDeltaMixer:
    """Qwen3-Next's: queries, keys and values are convolved and normed, the state is read, normed and gated."""

    what: GatedDelta
    mix_in: Linear  # [channels + 2 Hv, E]: queries, keys, values, what becomes beta and the decay
    mix_gate: Linear  # [Hv Dv, E]
    conv: Tensor  # [channels, K]
    step_bias: Tensor  # [Hv]
    rate: Tensor  # [Hv], negative
    mix_norm: Tensor  # [Dv]
    mix_out: Linear  # [E, Hv Dv]
    eps: float

    def project(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor, Tensor]:
        rows, gate = self.mix_in(h), self.mix_gate(h)
        if delta is None:
            return rows, gate
        rows, gate = plus(torch.cat((rows, gate), -1), delta).split((rows.shape[-1], gate.shape[-1]), -1)
        return rows, gate

    def advance(self, rows: Tensor, state: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
        w, past = self.what, self.what.channels * (self.what.taps - 1)
        qkv, b, a = rows.float().split((w.channels, w.value_heads, w.value_heads), -1)
        mixed, conv = _convolved(qkv, state[:, :past], self.conv, None)
        mixed = activate(mixed, "silu", exact=True)
        q, k, v = mixed.split((w.keys, w.keys, w.values), -1)
        q, k = (self._unit(each.unflatten(-1, (w.key_heads, w.key_dim))) for each in (q, k))
        decay = torch.exp(self.rate * softplus(a + self.step_bias.float()))
        heads = state[:, past:].unflatten(-1, (w.value_heads, w.key_dim, w.value_dim))
        v = v.unflatten(-1, (w.value_heads, w.value_dim))
        outputs, heads = gated_delta(q * w.key_dim**-0.5, k, v, heads, decay=decay, beta=sigmoid(b))
        return outputs.flatten(2), torch.cat((conv, heads.flatten(1)), -1)

    def _unit(self, heads: Tensor) -> Tensor:
        """Keys or queries [N, M, Hk, Dk] of length 1, one for each value head [N, M, Hv, Dk]."""
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
        share = self.what.value_heads // self.what.key_heads
        return heads.repeat(1, 1, share, 1) if self.what.cycled else heads.repeat_interleave(share, 2)

    def finish(self, outputs: Tensor, *gate: Tensor, exact: bool) -> tuple[Tensor]:
        heads = rms_norm(outputs.unflatten(-1, (-1, self.what.value_dim)), self.mix_norm, self.eps).flatten(1)
        gated = heads.float() * activate(gate[0].float(), "silu", exact=exact)
        return (gated.to(outputs.dtype),)


@dataclass(frozen=True, eq=False)
class Mamba2Mixer:
    """Mamba-2's: inputs and what writes and reads the states are convolved; outputs are gated and normed by group."""

    what: Mamba2
    mix_in: Linear  # [inner + channels + H, E]: the gate, what is convolved, time steps
    conv: Tensor  # [channels, K]
    conv_bias: Tensor | None  # [channels]
    step_bias: Tensor  # [H]
    rate: Tensor  # [H], negative
    skip: Tensor  # [H]
    mix_norm: Tensor | None  # [inner]
    mix_out: Linear  # [E, inner]
    eps: float
    activation: str = "silu"

    def project(self, h: Tensor, delta: Delta | None = None) -> tuple[Tensor, Tensor]:
        gate, rows = plus(self.mix_in(h), delta).split((self.what.inner, self.what.channels + self.what.heads), -1)
        return rows, gate

    def advance(self, rows: Tensor, state: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
        w, past = self.what, self.what.channels * (self.what.taps - 1)
        xbc, step = rows.float().split((w.channels, w.heads), -1)
        mixed, conv = _convolved(xbc, state[:, :past], self.conv, self.conv_bias)
        mixed = activate(mixed, self.activation, exact=True)
        x, b, c = mixed.split((w.inner, w.groups * w.state_size, w.groups * w.state_size), -1)
        x = x.unflatten(-1, (w.heads, w.head_dim))
        b, c = (each.unflatten(-1, (w.groups, w.state_size)) for each in (b, c))
        step = softplus(step + self.step_bias.float()).clamp(*w.steps)
        heads = state[:, past:].unflatten(-1, (w.heads, w.head_dim, w.state_size))
        outputs, heads = state_space(x, b, c, heads, step=step, rate=self.rate)
        outputs = outputs + x * self.skip.float()[:, None]
        return outputs.flatten(2), torch.cat((conv, heads.flatten(1)), -1)

    def finish(self, outputs: Tensor, *gate: Tensor, exact: bool) -> tuple[Tensor]:
        w, opened = self.what, activate(gate[0].float(), self.activation, exact=exact)
        rows = outputs.float() * opened if w.gate_first or not w.normed else outputs.float()
        if self.mix_norm is not None:
            groups = rows.unflatten(-1, (w.groups, -1))
            groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
            rows = (self.mix_norm * groups.flatten(1).to(outputs.dtype)).float()
            rows = rows if w.gate_first else rows * opened
        return (rows.to(outputs.dtype),)


def _convolved(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`short_conv` with its state as flat rows [N, C × (K - 1)]."""
    past = state.unflatten(-1, (x.shape[-1], -1)) if weight.shape[1] > 1 else state.new_empty(len(x), x.shape[-1], 0)
    mixed, past = short_conv(x, past, weight.float(), None if bias is None else bias.float())
    return mixed, past.flatten(1)
