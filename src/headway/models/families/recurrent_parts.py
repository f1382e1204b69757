"""Recurrent layers as configs describe them and as files keep their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.arrays import is_tensor
from headway.base.errors import BadModelFile, Unsupported
from headway.models.description import Mamba2
from headway.models.families.family import Cut, Part
from headway.models.keys import Keys
from headway.models.weights.shapes import layer_shapes

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def check_activation(keys: Keys) -> None:
    """Raise for an activation that recurrent layers do not have."""
    if keys.activation() != "silu":
        raise Unsupported(f"config.json: hidden_act is {keys.get('hidden_act')!r}; recurrent layers have silu alone")


def conv(name: str) -> dict[str, Part]:
    """A convolution of each channel by itself, stored as [C, 1, K]."""

    def shape(c: ModelConfig) -> tuple[int, ...]:
        channels, taps = recurrent_shape(c, "conv")
        return channels, 1, taps

    return {"conv": Cut(f"{name}.weight", shape, lambda tensor, c: tensor[:, 0]), "conv_bias": f"{name}.bias"}


def rate(name: str) -> Cut:
    """A head's rate of decay, negative, stored as the logarithm of its size."""
    return Cut(
        name,
        lambda c: recurrent_shape(c, "rate"),
        lambda tensor, c: -(tensor.float().exp() if is_tensor(tensor) else np.exp(tensor)),
    )


def mamba2_parts(at: str) -> dict[str, Part]:
    """The weights of a Mamba-2 layer."""
    return {
        "mix_in": f"{at}.in_proj.weight",
        "mix_out": f"{at}.out_proj.weight",
        "mix_norm": f"{at}.norm.weight",
        "step_bias": f"{at}.dt_bias",
        "skip": f"{at}.D",
        "rate": rate(f"{at}.A_log"),
        **conv(f"{at}.conv1d"),
    }


def gguf_ssm(*, columns: bool) -> dict[str, Part]:
    """The same weights as llama.cpp's files keep them: rates as they are; with `columns` some are matrices."""
    heads: dict[str, Part] = {"rate": "ssm_a", "skip": "ssm_d", "mix_norm": "ssm_norm.weight"}
    if columns:
        heads["rate"], heads["skip"] = _column("ssm_a", "rate"), _column("ssm_d", "skip")
        heads["mix_norm"] = Cut("ssm_norm.weight", _by_group, lambda tensor, c: tensor.reshape(-1))
    return {
        "mix_in": "ssm_in.weight",
        "mix_out": "ssm_out.weight",
        "step_bias": "ssm_dt.bias",
        "conv": "ssm_conv1d.weight",
        "conv_bias": "ssm_conv1d.bias",
        **heads,
    }


def _column(name: str, role: str) -> Cut:
    return Cut(name, lambda c: (*recurrent_shape(c, role), 1), lambda tensor, c: tensor[:, 0])


def _by_group(c: ModelConfig) -> tuple[int, int]:
    assert isinstance(c.description.recurrence, Mamba2)
    groups = c.description.recurrence.groups
    return groups, c.description.recurrence.inner // groups


def gguf_recurrent_layers(keys: Keys, layers: int) -> frozenset[int]:
    """The layers of a GGUF file without key heads."""
    counts = keys.get("attention.head_count_kv")
    if not isinstance(counts, Sequence) or isinstance(counts, str) or len(counts) != layers:
        raise BadModelFile(
            f"GGUF: {keys.prefix}attention.head_count_kv is {counts!r}; it must be a list with a number for each of "
            f"{layers} layers"
        )
    return frozenset(i for i, count in enumerate(counts) if count == 0)


def step_limits(keys: Keys) -> tuple[float, float]:
    """The bounds of time steps; no list means none."""
    given = keys.get("time_step_limit")
    limits = (0.0, math.inf) if given is None else given
    if isinstance(limits, list):
        limits = [math.inf if each == {"__float__": "Infinity"} else each for each in limits]  # as transformers writes
    if not isinstance(limits, list | tuple) or len(limits) != 2 or not all(_is_number(each) for each in limits):
        raise BadModelFile(f"{keys.source}: time_step_limit is {given!r}; it must be a list of two numbers")
    low, high = map(float, limits)
    if not 0 <= low <= high:
        raise BadModelFile(
            f"{keys.source}: time_step_limit is {given!r}; it must be two numbers of at least 0, in order"
        )
    return low, high


def mamba2_of(keys: Keys, config: ModelConfig, *, inner: int) -> Mamba2:
    """The state-space layers of a config that spells its keys `mamba_…`."""
    heads = keys.size("mamba_n_heads", 128)
    head_dim = inner // heads if keys.get("mamba_d_head") in (None, "auto") else keys.size("mamba_d_head")
    if heads * head_dim != inner:
        raise BadModelFile(
            f"{keys.source}: {heads} heads of {head_dim} (mamba_n_heads, mamba_d_head) do not make up {inner}"
        )
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=keys.size("mamba_n_groups", 1),
        state_size=keys.size("mamba_d_state", 256),
        taps=keys.size("mamba_d_conv", 4),
        conv_bias=keys.bool("mamba_conv_bias", True),
        bias=keys.bool("mamba_proj_bias", False),
        steps=step_limits(keys),
    )


def gguf_mamba2(keys: Keys, tensors: set[str]) -> Mamba2:
    """The state-space layers of a GGUF file."""
    heads, inner = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if inner % heads:
        raise BadModelFile(f"GGUF: {heads} heads (ssm.time_step_rank) cannot share {inner} (ssm.inner_size) evenly")
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=keys.size("ssm.group_count"),
        state_size=keys.size("ssm.state_size"),
        taps=keys.size("ssm.conv_kernel"),
        conv_bias=any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        bias=any(name.endswith(".ssm_in.bias") for name in tensors),
    )


def recurrent_shape(c: ModelConfig, role: str) -> tuple[int, ...]:
    """The shape of a role in the recurrent layers of a model."""
    return layer_shapes(c, c.recurrent_layers[0])[role]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
