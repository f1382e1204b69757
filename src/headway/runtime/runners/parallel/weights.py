"""A decoder in memory, or new weights for one, sent to ranks part by part: each keeps its share and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from headway.base.arrays import from_tensor
from headway.kernels.reference.quantized import tensor
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.described import DescribedDecoder, DescribedLayer
from headway.models.experts import ExpertWeights
from headway.models.layers import DecoderLayer, Linear
from headway.models.shards import Split
from headway.models.weights.update import GivenWeights
from headway.models.weights.update_tensors import dense, own_weights
from headway.runtime.runners.parallel.channel import RankMessage

MATRICES = ("qkv", "out", "gate_up", "down")
EXPERTS = ("router", "shared_gate_up", "shared_down", "shared_router")
NORMS = ("input_norm", "q_norm", "k_norm", "mlp_norm")
DESCRIBED = ("post_attention_norm", "post_mlp_norm", "sinks")
BIASES = ("input_norm_bias", "mlp_norm_bias", "post_attention_norm_bias", "post_mlp_norm_bias")
OUTSIDE = ("embedding", "output", "final_norm", "inv_freq", "final_norm_bias", "output_bias", "positions")


def part_messages(decoder: Decoder) -> Iterator[RankMessage]:
    """A decoder's parts: what is outside of layers, then layer by layer."""
    outside = {name: getattr(decoder, name, None) for name in OUTSIDE}
    if decoder.output is decoder.embedding:
        outside["output"] = None
    yield _message("outside", outside)
    for layer in decoder.layers:
        parts: dict[str, Any] = {name: getattr(layer, name, None) for name in (*NORMS, *DESCRIBED, *BIASES)}
        linears = {name: getattr(layer, name) for name in MATRICES}
        experts = getattr(layer, "experts", None)
        linears |= {} if experts is None else {f"experts.{name}": getattr(experts, name) for name in EXPERTS}
        for name, linear in linears.items():
            parts |= {} if linear is None else {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}
        yield _message("layer", parts)


def _message(kind: str, parts: Mapping[str, Any]) -> RankMessage:
    there = {name: part for name, part in parts.items() if part is not None}
    return RankMessage(kind, {"names": list(there)}, [from_tensor(part) for part in there.values()])


def update_messages(given: GivenWeights) -> Iterator[RankMessage]:
    """The weights of an update, one at a time, and that there are no more."""
    for name, weight in given.items():
        yield _message("weight", {name: weight})
    yield RankMessage("update", {}, ())


class WeightReader:
    """A rank's share of the weights of an update, which come one at a time."""

    def __init__(self, split: Split) -> None:
        self._split, self._shares = split, dict[str, Any]()

    def take(self, message: RankMessage, config: ModelConfig) -> None:
        """One weight more; `config` is that of the rank's layers."""
        whole = zip(message.values["names"], [tensor(array) for array in message.arrays], strict=True)
        self._shares |= dict(own_weights(whole, self._split, config).items())

    def updated(self, decoder: Decoder) -> Decoder:
        """The decoder with the weights that have come."""
        given, self._shares = GivenWeights(decoder.config, self._shares), {}
        return dense(decoder, given)


class PartReader:
    """A rank's share of a decoder that comes part by part."""

    def __init__(self, config: ModelConfig, split: Split, *, described: bool) -> None:
        self._config, self._split, self._described = config, split, described
        self._outside: dict[str, Any] = {}
        self._layers: list[DecoderLayer] = []

    def take(self, message: RankMessage) -> None:
        """One part more."""
        arrays = zip(message.values["names"], message.arrays, strict=True)
        parts: dict[str, Any] = {name: tensor(array.copy()) for name, array in arrays}
        if message.kind == "layer":
            self._layers.append(self._split.layer(self._layer(parts)))
            return
        embedding = self._split.vocabulary(parts["embedding"])
        output = self._split.vocabulary(parts["output"]) if "output" in parts else embedding
        self._outside = {**parts, "embedding": embedding, "output": output}

    def decoder(self) -> Decoder:
        """The share, when all parts have come."""
        kind: Any = DescribedDecoder if self._described else Decoder
        return self._split.finished(kind(config=self._config, layers=tuple(self._layers), **self._outside))

    def _layer(self, parts: dict[str, Tensor]) -> DecoderLayer:
        c = self._config

        def linear(name: str) -> Linear | None:
            weight = parts.pop(f"{name}.weight", None)
            return None if weight is None else Linear(weight, parts.pop(f"{name}.bias", None))

        given: dict[str, Any] = {name: linear(name) for name in MATRICES}
        router, *shared = [linear(f"experts.{name}") for name in EXPERTS]
        given |= {"q_norm": None, "k_norm": None, **parts}
        given |= {"heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, "eps": c.norm_eps}
        if not self._described:
            return DecoderLayer(**given)
        experts = None
        if router is not None:
            assert c.description.experts is not None
            experts = ExpertWeights(c.description.experts, router, *shared)
        return DescribedLayer(**given, description=c.description, experts=experts)
