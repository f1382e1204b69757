"""An adapter that fits a model: every pair has its target's shape, and q and k rows lie as the model has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headway.base.arrays import widen
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, Unsupported
from headway.models.adapters.adapter import Adapter
from headway.models.adapters.low_rank import HEAD, ROLES, LowRank, Target
from headway.models.capabilities import ATTENTION, Capabilities
from headway.models.config import ModelConfig
from headway.models.families import FAMILIES, by_name
from headway.models.weights.rows import half_split
from headway.models.weights.shapes import has_experts, layer_shapes

MAX_FACTOR = 1e38  # what float32 can hold
LARGEST = 1024.0  # what the largest value of a float16 matrix is brought near to


@dataclass(frozen=True, eq=False)
class BoundAdapter:
    """The pairs of an adapter by layer and role, checked against a config."""

    digest: str
    name: str
    layers: tuple[Mapping[str, LowRank], ...]
    head: LowRank | None = None  # of the output matrix

    @property
    def rank(self) -> int:
        """The largest rank of the layers' pairs; 0 where the output matrix alone has one."""
        return max((pair.rank for layer in self.layers for pair in layer.values()), default=0)


def bind(adapter: Adapter, config: ModelConfig) -> BoundAdapter:
    """The adapter for a model of this config. Raises if it was trained on another model's shapes."""
    what = f"the adapter {adapter.name!r}"
    _check_architecture(adapter, config, what)
    layers: list[dict[str, LowRank]] = [{} for _ in range(config.layers)]
    for target, pair in sorted(adapter.pairs.items()):
        if target.layer >= config.layers:
            raise BadModelFile(
                f"{what} has weights for {target}, and the model has {config.layers} layers; it is another model's"
            )
        _check_role(target, config, what)
        has = (pair.b.shape[0], pair.a.shape[1])
        needs = head_shape(config) if target == HEAD else layer_targets(config, target.layer)[target.role]
        if has != needs:
            raise BadModelFile(
                f"{what} has weights of {list(has)} for {target}, and the model's matrix is {list(needs)}; it is "
                "another model's"
            )
        if target == HEAD:
            continue
        if target.role in ("q", "k") and _interleaves(adapter, config):
            layers[target.layer][target.role] = replace(pair, b=half_split(pair.b, config.head_dim, config.rope.dim))
        else:
            layers[target.layer][target.role] = pair
    _check_all_there(adapter, config, what)
    return BoundAdapter(adapter.digest, adapter.name, tuple(layers), adapter.pairs.get(HEAD))


def target_shapes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """The shape [N, K] of each role's matrix; roles that no layer has are left out."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(c.layers):
        shapes |= layer_targets(c, layer)
    return {role: shapes[role] for role in ROLES if role in shapes}


def layer_targets(c: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """The shape [N, K] of each role's matrix in a layer."""
    shapes = layer_shapes(c, layer)
    return {role: (shapes[role][0], shapes[role][1]) for role in ROLES if role in shapes}


def _check_role(target: Target, config: ModelConfig, what: str) -> None:
    if target == HEAD:
        if not Capabilities.of(config).adapts_head:
            raise Unsupported(
                f"{what} has weights for {target}, and a {config.family} model scales or caps its logits, after which "
                f"adapters of the output matrix would be added; train it on {', '.join(target_shapes(config))}"
            )
        return
    if target.role in layer_shapes(config, target.layer):
        return
    kind = "its experts" if has_experts(config, target.layer) else "a feed-forward without a gate"
    if target.role in ATTENTION:
        kind = "no such matrix" if config.description.latent is None else "latent attention"
    raise Unsupported(
        f"{what} has weights for {target}, and this layer of the {config.family} model has {kind}, which adapters do "
        f"not change; train it on {', '.join(target_shapes(config))}"
    )


def head_shape(c: ModelConfig) -> tuple[int, int]:
    """The shape [V, E] of the output matrix."""
    return c.vocab_size, c.hidden_size


def stored_pair(pair: LowRank, *, half: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """A and B as a runner keeps them, and what to multiply their product with: in float32, or in float16."""
    a, b = widen(pair.a), widen(pair.b)
    if half:
        (a, down), (b, out) = as_half(a), as_half(b)
        factor = pair.scaling * down * out
        if abs(factor) < MAX_FACTOR:
            return a, b, factor
        a, b = widen(pair.a), widen(pair.b)
    return a, b * np.float32(pair.scaling), 1.0


def as_half(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """The matrix in float16 times a power of two that uses its range well, and what to multiply with to undo it."""
    largest = float(np.abs(matrix).max())
    if largest == 0.0:
        return matrix.astype(np.float16), 1.0
    power = math.floor(math.log2(LARGEST / largest))
    return (matrix.astype(np.float64) * 2.0**power).astype(np.float16), 2.0**-power


def _interleaves(adapter: Adapter, config: ModelConfig) -> bool:
    """Whether its q and k rows lie for rotation of neighboring pairs."""
    family = by_name(config.family)
    if adapter.architecture is None:
        return family.interleaved_hf
    return any(family.interleaved_gguf for family in FAMILIES if family.gguf == adapter.architecture)


def _check_architecture(adapter: Adapter, config: ModelConfig, what: str) -> None:
    if adapter.architecture is None:
        return
    own = "llama" if config.family == "mistral" else by_name(config.family).gguf  # as Mistral's GGUF files say
    if adapter.architecture != own:
        raise BadModelFile(f"{what} is for the architecture {adapter.architecture!r}; the model's is {own!r}")


def _check_all_there(adapter: Adapter, config: ModelConfig, what: str) -> None:
    """Raise if the adapter's config targets a layer of the model for which it has no weights."""
    if adapter.rules is None:
        return
    for layer in range(config.layers):
        for role in sorted(layer_shapes(config, layer).keys() & set(ROLES)):
            target = Target(layer, role)
            if target not in adapter.pairs and adapter.rules.has(f"model.{target}"):
                raise BadModelFile(f"{what}: its config targets {target}, and there are no weights for it")
    if HEAD not in adapter.pairs and adapter.rules.has(str(HEAD)):
        raise BadModelFile(f"{what}: its config targets {HEAD}, and there are no weights for it")
