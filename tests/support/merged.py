"""A decoder with adapters merged into its weights: what a row under them must compute."""

from __future__ import annotations

from dataclasses import replace

import torch

import headway as hw
from headway.kernels.reference.quantized import tensor
from headway.models.adapters.low_rank import HEAD, Target
from headway.models.decoder import Decoder
from headway.models.layers import Linear

STACKS = {"qkv": ("q", "k", "v"), "out": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def merged(decoder: Decoder, *uses: tuple[hw.Adapter, float]) -> Decoder:
    """The decoder with scale × scaling × B A added to its matrices, computed in float64."""
    c = decoder.config
    sizes = {"q": c.heads * c.head_dim, "o": c.hidden_size, "down": c.hidden_size}
    sizes |= dict.fromkeys(("k", "v"), c.kv_heads * c.head_dim)
    sizes |= dict.fromkeys(("gate", "up"), c.intermediate_size)
    layers = []
    for number, layer in enumerate(decoder.layers):
        changed = {}
        for stack, roles in STACKS.items():
            linear = getattr(layer, stack)
            weight, first = linear.weight.double(), 0
            for role in roles:
                for adapter, scale in uses:
                    pair = adapter.pairs.get(Target(number, role))
                    if pair is not None:
                        delta = scale * pair.scaling * (tensor(pair.b).double() @ tensor(pair.a).double())
                        weight[first : first + sizes[role]] += delta
                first += sizes[role]
            changed[stack] = Linear(weight.to(torch.float32), linear.bias)
        layers.append(replace(layer, **changed))
    output = decoder.output.double()
    for adapter, scale in uses:
        if (pair := adapter.pairs.get(HEAD)) is not None:
            output = output + scale * pair.scaling * (tensor(pair.b).double() @ tensor(pair.a).double())
    return replace(decoder, layers=tuple(layers), output=output.to(torch.float32))
