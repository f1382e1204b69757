"""An adapter that fits a model: every pair has its target's shape, and q and k rows lie as the model has them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import product
from typing import Any, Generic, TypeVar

import numpy as np

from headway.base.arrays import widen
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, Unsupported
from headway.base.specs.adapters import OUTSIDE
from headway.kernels.native.library import EXPERT_ROLES, HEAD_ROLES, STREAM_ROLES
from headway.models.adapters.adapter import Adapter
from headway.models.adapters.gguf import NAMES as GGUF_MODULES
from headway.models.adapters.low_rank import HEAD, MODULES, ROLES, LowRank, Target
from headway.models.adapters.modules import HEADS, Module, Share, layer_modules, outer_modules
from headway.models.adapters.target_rules import Patterns
from headway.models.capabilities import ADAPTED, ATTENTION
from headway.models.config import ModelConfig
from headway.models.description import GatedDelta
from headway.models.families import FAMILIES, by_name
from headway.models.weights.rows import half_split
from headway.models.weights.shapes import has_experts, layer_shapes, model_shapes

Stored = TypeVar("Stored")
EXPERT = re.compile(r"\.(\d{1,6})(?=\.|$)")  # the number of an expert in the name of its module
MAX_FACTOR = 1e38  # what float32 can hold
LARGEST = 1024.0  # what the largest value of a float16 matrix is brought near to


@dataclass(frozen=True, eq=False)
class BoundAdapter:
    """The pairs of an adapter by layer and role, checked against a config; those of one expert by `role.expert`.

    `outer` are those outside of layers but for the output matrix, of one stream by `role.number`.
    """

    digest: str
    name: str
    layers: tuple[Mapping[str, LowRank], ...]
    head: LowRank | None = None  # of the output matrix
    outer: Mapping[str, LowRank] = field(default_factory=dict)

    @property
    def places(self) -> tuple[Mapping[str, LowRank], ...]:
        """The pairs of each layer, and at last (`OUTSIDE`) those outside of them."""
        return (*self.layers, self.outer)

    @property
    def rank(self) -> int:
        """The largest rank of the pairs; 0 where the output matrix alone has one."""
        return max((pair.rank for own in self.places for pair in own.values()), default=0)


def bind(adapter: Adapter, config: ModelConfig) -> BoundAdapter:
    """The adapter for a model of this config. Raises if it was trained on another model's shapes."""
    what = f"the adapter {adapter.name!r}"
    _check_architecture(adapter, config, what)
    places: list[dict[str, LowRank]] = [{} for _ in range(config.layers + 1)]  # the last one is `OUTSIDE`
    modules = _Modules(adapter, config)
    interleaved = not adapter.in_order and _interleaves(adapter, config)
    for target, pair in sorted(adapter.pairs.items()):
        if target.layer >= config.layers:
            raise BadModelFile(
                f"{what} has weights for {target}, and the model has {config.layers} layers; it is another model's"
            )
        module, expert = _head(config) if target == HEAD else _module(target, modules, config, what)
        each = _each_pair(pair, module, expert, f"{what} has weights", target)
        if target == HEAD:
            continue
        for (role, rows), (which, own) in product(module.shares, each):
            key = role if which is None else f"{role}.{which}"
            if key in places[target.layer]:
                raise BadModelFile(f"{what} has weights for {target}, and others for the model's {key} besides")
            _check_heads(adapter, target, role, config, what)
            if role in HEAD_ROLES and which is None:
                places[target.layer] |= _of_heads(role, own, config)
                continue
            b = own.b if rows is None else np.ascontiguousarray(own.b[rows])
            if role in ("q", "k") and interleaved:
                b = half_split(b, config.head_dim, config.rope.dim)
            places[target.layer][key] = replace(own, b=b)
    _check_all_there(adapter, modules, places, what)
    *layers, outer = places
    return BoundAdapter(adapter.digest, adapter.name, tuple(layers), adapter.pairs.get(HEAD), outer)


def _each_pair(
    pair: LowRank, module: Module, expert: int | None, what: str, target: Target
) -> list[tuple[int | None, LowRank]]:
    """The pairs of a target that have its matrix's shape, and the expert of each, or None."""
    many = "experts" if target.layer != OUTSIDE else "matrices"
    if pair.experts != (module.experts if module.stacked else 0):
        count = f"{module.experts} {many}" if module.stacked else "one matrix"
        raise BadModelFile(
            f"{what} of {pair.experts or 'no'} {many} for {target}, and the model has {count}; it is another model's"
        )
    if expert is not None and expert >= module.experts:
        raise BadModelFile(f"{what} for {target}, and the model has {module.experts} {many}; it is another model's")
    has = (pair.b.shape[-2], pair.a.shape[-1])
    turned = module.stacked and has[::-1] == module.shape != has  # a parameter that PEFT took for its transpose
    if has != module.shape and not turned:
        raise BadModelFile(
            f"{what} of {list(has)} for {target}, and the model's matrix is {list(module.shape)}; it is another model's"
        )
    if not module.stacked:
        return [(expert, pair)]
    if turned or (module.turned and has == has[::-1]):
        pair = replace(pair, a=pair.b.swapaxes(1, 2), b=pair.a.swapaxes(1, 2))
    return [(i, replace(pair, a=_whole(pair.a[i]), b=_whole(pair.b[i]))) for i in range(pair.experts)]


def _of_heads(role: str, pair: LowRank, config: ModelConfig) -> dict[str, LowRank]:
    """The pairs of each head, of one for all keys and values: what makes keys takes queries to latent vectors instead.

    A is one array for all of them.
    """
    latent = config.description.latent
    assert latent is not None
    by_head = pair.b.reshape(config.heads, -1, pair.rank)
    if role == "key_up":
        b = np.ascontiguousarray(pair.a.T)
        own = [LowRank(np.ascontiguousarray(rows[: latent.key_dim].T), b, pair.scaling) for rows in by_head]
    else:
        own = [LowRank(pair.a, np.ascontiguousarray(rows[latent.key_dim :]), pair.scaling) for rows in by_head]
    return {f"{role}.{head}": pair for head, pair in enumerate(own)}


def _whole(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix)


class _Modules:
    """The linear layers of a model by the names that an adapter has for them."""

    def __init__(self, adapter: Adapter, config: ModelConfig) -> None:
        self._adapter, self._config = adapter, config
        self._layers: dict[int, dict[str, Module]] = {}

    def of(self, layer: int) -> dict[str, Module]:
        if layer not in self._layers:
            self._layers[layer] = self._of(layer)
        return self._layers[layer]

    def find(self, target: Target) -> tuple[Module, int | None] | None:
        """The module of a target, and its expert where it is one of several."""
        named = self.of(target.layer)
        if (module := named.get(target.part)) is not None:
            return module, None
        numbers = EXPERT.findall(target.part)
        module = named.get(EXPERT.sub(".{}", target.part)) if len(numbers) == 1 else None
        return None if module is None else (module, int(numbers[0]))

    def _of(self, layer: int) -> dict[str, Module]:
        if self._adapter.in_order:
            return _by_role(self._config, layer)
        gguf = self._adapter.architecture is not None
        if layer == OUTSIDE:
            return outer_modules(self._config, gguf=gguf)
        named = GGUF_MODULES if gguf else MODULES
        return {named.get(name, name): m for name, m in layer_modules(self._config, layer, gguf=gguf).items()}


def _by_role(c: ModelConfig, layer: int) -> dict[str, Module]:
    """The modules of a layer, or outside of them, by role: those of experts together, or each by its number."""
    modules: dict[str, Module] = {}
    for role, shape in layer_targets(c, layer).items():
        if count := matrices_of(c, role):
            modules[f"{role}.{{}}"] = Module(shape, (Share(role),), count)
            modules[role] = Module(shape, (Share(role),), count, stacked=True)
        else:
            modules[role] = Module(shape, (Share(role),))
    return modules


def target_shapes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """The shape [N, K] of each role's matrix, of experts that of one; roles that the model lacks are left out."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in (*range(c.layers), OUTSIDE):
        shapes |= layer_targets(c, layer)
    return {role: shapes[role] for role in ADAPTED if role in shapes}


def layer_targets(c: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """The shape [N, K] of each role's matrix in a layer, or outside of them; but for the output matrix's."""
    shapes = model_shapes(c) if layer == OUTSIDE else layer_shapes(c, layer)
    return {role: (shapes[role][-2], shapes[role][-1]) for role in ADAPTED if role in shapes}


def matrices_of(c: ModelConfig, role: str) -> int:
    """How many matrices there are of a role: one for each expert, head or stream; 0 if it is one for all."""
    experts, altup = c.description.experts, c.description.altup
    if role in EXPERT_ROLES and experts is not None:
        return experts.count
    if role in STREAM_ROLES and altup is not None:
        return altup.streams - 1
    return c.heads if role in HEAD_ROLES else 0


def _head(config: ModelConfig) -> tuple[Module, None]:
    """The output matrix."""
    return Module(head_shape(config), (Share(HEAD.part),)), None


def _module(target: Target, modules: _Modules, config: ModelConfig, what: str) -> tuple[Module, int | None]:
    """The matrix of a target, if adapters may change it, and its expert if it has one."""
    found = modules.find(target)
    if found is not None and all(role in ADAPTED for role, _ in found[0].shares):
        return found
    if found is not None:
        kind = f"a matrix of {', '.join(role for role, _ in found[0].shares)} there"
    elif target.part not in ROLES:
        kind = "no linear layer of that name"
    elif target.part in ATTENTION:
        kind = "no such matrix" if config.description.latent is None else "latent attention"
    else:
        kind = "its experts" if has_experts(config, target.layer) else "a feed-forward without a gate"
    place = "the" if target.layer == OUTSIDE else "this layer of the"
    raise Unsupported(
        f"{what} has weights for {target}, and {place} {config.family} model has {kind}, which adapters do not change; "
        f"train it on {', '.join(target_shapes(config))}"
    )


def _check_heads(adapter: Adapter, target: Target, role: str, config: ModelConfig, what: str) -> None:
    """Raise where the value heads of a gated delta net are in another order in the adapter than in the model."""
    how = config.description.recurrence
    if adapter.in_order or not isinstance(how, GatedDelta) or not role.startswith("mix_"):
        return
    if how.cycled != (adapter.architecture is not None and by_name(config.family).cycled_gguf):
        theirs, ours = ("a folder", "a GGUF file") if how.cycled else ("a GGUF file", "a folder")
        raise Unsupported(
            f"{what} has weights for {target} in the order that heads have in {theirs}, and the {config.family} model "
            f"is from {ours}, which has another; load the model from {theirs}"
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


class StoredPairs(Generic[Stored]):
    """Pairs as a runner keeps them: `make` is given a matrix, and whether it is B, once for all pairs that have it."""

    def __init__(self, make: Callable[[np.ndarray, bool], Stored], *, half: bool) -> None:
        self._make, self._half = make, half
        self._known: dict[tuple[int, float, Any], tuple[np.ndarray, Stored]] = {}

    def of(self, pair: LowRank) -> tuple[Stored, Stored, float]:
        """A, B and what to multiply their product with."""
        a, b, factor = stored_pair(pair, half=self._half)
        return self._held(pair.a, a, 1.0, False), self._held(pair.b, b, pair.scaling, True), factor

    def _held(self, source: np.ndarray, matrix: np.ndarray, scaling: float, last: bool) -> Stored:
        key = id(source), scaling, (matrix.dtype, last)
        if key not in self._known:
            self._known[key] = source, self._make(matrix, last)
        return self._known[key][1]

    @property
    def all(self) -> list[Stored]:
        """Everything that was made."""
        return [made for _, made in self._known.values()]


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


def _targets(adapter: Adapter, modules: _Modules, layer: int) -> Iterator[tuple[Target, Module]]:
    """What an adapter may have in a layer, or outside of them.

    Releases of transformers differ in what is a linear layer of a router and of experts: a config that means all of a
    name has them in one and not in another. So experts without any weights are left out, and routers unless listed.
    """
    own = {EXPERT.sub(".{}", target.part) for target in adapter.pairs if target.layer == layer}
    for part, module in sorted(modules.of(layer).items()):
        by_expert = bool(module.experts) and not module.stacked
        roles = {role for role, _ in module.shares}
        if by_expert and (part in own or layer == OUTSIDE):
            yield from ((Target(layer, part.format(expert)), module) for expert in range(module.experts))
        elif not by_expert and (roles != {"router"} or not isinstance(adapter.rules and adapter.rules.modules, str)):
            yield Target(layer, part), module


def _keys(target: Target, module: Module) -> Iterator[str]:
    """What pairs of a module are called; of all experts or heads those of the first."""
    for role, _ in module.shares:
        if module.stacked or role in HEAD_ROLES:
            yield f"{role}.0"
        else:
            yield role + "".join(f".{number}" for number in EXPERT.findall(target.part) if module.experts)


def _check_all_there(adapter: Adapter, modules: _Modules, places: Sequence[Mapping[str, LowRank]], what: str) -> None:
    """Raise if the adapter's config targets a matrix of the model for which it has no weights, by any name."""
    if (rules := adapter.rules) is None:
        return
    patterns = Patterns(what)
    for layer in (*range(len(places) - 1), OUTSIDE):
        for target, module in _targets(adapter, modules, layer):
            if any(role not in ADAPTED for role, _ in module.shares):
                continue
            if all(key in places[layer] for key in _keys(target, module)):
                continue
            name = rules.name(layer, target.module)
            if rules.has_parameter(name) if module.stacked else rules.has(name, patterns):
                raise BadModelFile(f"{what}: its config targets {target}, and there are no weights for it")
    if HEAD not in adapter.pairs and any(rules.has(head, patterns) for head in HEADS):
        raise BadModelFile(f"{what}: its config targets {HEAD}, and there are no weights for it")
