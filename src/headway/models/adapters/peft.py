"""PEFT's LoRA adapters: adapter_config.json and adapter_model.safetensors, or the same as a dict of tensors.

The config says which modules have LoRA, with which rank and alpha; the tensors are held to it. What changes a model in
other ways (DoRA, biases, saved modules, embeddings, …) is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.arrays import from_tensor, is_tensor, unreadable
from headway.base.checks import check_integer, check_number
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, ModelNotFound, Unsupported, WrongType
from headway.base.files import read_json
from headway.base.specs.adapters import OUTSIDE
from headway.base.text import short_repr
from headway.models.adapters.low_rank import HEAD, MODULES, Limits, LowRank, Target, check_layer
from headway.models.adapters.modules import HEADS, OUTER, layer_places, outer_names
from headway.models.adapters.target_rules import REPEATS, Patterns, TargetRules
from headway.models.files.weights import SafetensorsWeights

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
OF_EXPERTS = ("gate_up_proj", "down_proj")  # parameters with the matrices of all experts, as their modules have them
PARAMETER = re.compile(r"(?:^|\.)experts(?:\.base_layer)?$|\.base_layer$")  # a module with such parameters
MAX_PATTERN = 4096  # characters of a pattern
MAX_PATTERNS = 4096  # of a field; peft may write one for each module
MAX_REPEATS = 6  # unbounded repetitions of a pattern: more could take for ever on a module's name
PLACES, LAYERS = layer_places(), "layers."
MODELS = {place.removesuffix(LAYERS) for place in PLACES if place.endswith(LAYERS)}  # what has layers called so


def _any_of(names: Iterable[str]) -> str:
    return "|".join(re.escape(name).replace(r"\{\}", r"\d{1,6}") for name in sorted(names))


NAME = re.compile(
    rf"(?:base_model\.model\.)?(?P<module>(?P<place>{_any_of(PLACES)})(?P<layer>\d+)\.(?P<part>\w+(?:\.\w+){{0,7}})|"
    rf"(?P<model>{_any_of(MODELS)})(?P<own>{_any_of(outer_names(*OUTER))})|(?:{_any_of(HEADS)}))"
    r"\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight"
)
# Fields that must be empty, and what they are.
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trainable tokens",
    "lora_bias": "biases (lora_bias)",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron layers",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
}
# Ways to begin that change the base weights: the adapter then fits other weights than the model's.
OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """What was read: the pairs, and the config's rules if there was one."""

    pairs: dict[Target, LowRank]
    rules: TargetRules | None


def read_folder(folder: Path, limits: Limits) -> PeftAdapter:
    """The adapter in a folder."""
    if not (folder / WEIGHTS).exists():
        if (folder / PICKLE).exists():
            raise Unsupported(
                f"{folder} holds its weights as a pickle ({PICKLE}), which can run code and is never loaded; save the "
                "adapter again with safe_serialization=True"
            )
        raise ModelNotFound(f"{folder} has no {WEIGHTS}; an adapter folder has that and {CONFIG}")
    config = read_json(folder / CONFIG, required=True)
    with SafetensorsWeights(folder, WEIGHTS) as weights:
        limits.check_bytes(f"{folder / WEIGHTS}", sum(weights.nbytes(name) for name in weights.names()))
        tensors = {name: _load(weights, name) for name in weights.names()}
    return _read(tensors, config, None, limits, str(folder))


def _load(weights: SafetensorsWeights, name: str) -> np.ndarray:
    stored = {"F16": "float16", "BF16": "bfloat16"}.get(weights.stored(name), "float32")
    return weights.array(name, stored).copy()  # not the file's map


def read_tensors(
    tensors: Mapping[str, Any], config: Mapping[str, Any] | None, alpha: float | None, limits: Limits
) -> PeftAdapter:
    """The adapter of tensors in memory."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not (is_tensor(tensor) or isinstance(tensor, np.ndarray)):
            raise WrongType(f"{short_repr(name)} is {short_repr(tensor)}; give a dict from names to tensors or arrays")
        if isinstance(tensor, np.ndarray) and tensor.dtype.kind != "f":
            raise BadModelFile(f"{short_repr(name)} is an array of {tensor.dtype}; floats are needed")
        if (why := unreadable(tensor)) is not None:
            raise BadModelFile(f"{short_repr(name)} is {why}; dense tensors are needed")
    limits.check_bytes("the adapter", sum(tensor.nbytes for tensor in tensors.values()))
    copies = {name: np.array(from_tensor(tensor), order="C") for name, tensor in tensors.items()}
    if config is not None and not isinstance(config, Mapping):
        raise WrongType(f"the config is {short_repr(config)}; give what adapter_config.json holds, or to_dict()")
    return _read(copies, config, alpha, limits, "the adapter")


def _read(
    tensors: Mapping[str, Any], config: Mapping[str, Any] | None, alpha: float | None, limits: Limits, where: str
) -> PeftAdapter:
    facts = None if config is None else _Config(config, where)
    sides: dict[Target, dict[str, np.ndarray]] = {}
    modules: dict[Target, str] = {}
    place = "model.layers."
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise _stranger(name, where)
        target = HEAD
        if match["part"] is not None:
            layer = check_layer(match["layer"], f"{where}: {name}")
            target, place = Target(layer, MODULES.get(match["part"], match["part"])), match["place"]
            parameter = None if facts is None else facts.parameter(match["module"])
            if parameter is not None:
                target = Target(layer, parameter.removeprefix(f"{place}{layer}."))
            elif PARAMETER.search(match["part"]):
                raise Unsupported(
                    f"{where}: the tensor {short_repr(name)} is for a parameter with all experts, and there is no "
                    f"{CONFIG} that lists it among target_parameters and says its rank; give the config"
                )
        elif match["own"] is not None:
            target, place = Target(OUTSIDE, match["own"]), match["model"] + LAYERS
        side = sides.setdefault(target, {})
        if match["side"] in side:
            raise BadModelFile(f"{where}: {target} has two matrices {match['side']}; it must have one")
        side[match["side"]], modules[target] = tensor, match["module"]
    if not sides:
        raise BadModelFile(f"{where} has no LoRA weights")
    if HEAD in sides and config is not None and config.get("ensure_weight_tying"):
        raise Unsupported(
            f"{where}: {CONFIG} has ensure_weight_tying with LoRA of {HEAD}, which changes the embedding too: LoRA of "
            f"embeddings is not supported; {MERGE}"
        )
    pairs: dict[Target, LowRank] = {}
    for target, side in sides.items():
        what = f"{where}: {target}"
        if side.keys() != {"A", "B"}:
            raise BadModelFile(f"{what} has only the matrix {next(iter(side))}; A and B are needed")
        a, b, key, experts = side["A"], side["B"], modules[target], False
        if facts is not None:
            key = facts.key(key)
            experts = key != modules[target] and a.shape[:1] != (facts.rank(key),)
            a, b = _by_expert(a, b, facts.rank(key), what) if experts else (a, b)
        limits.check(what, a, b, experts=experts)
        rank = a.shape[-2]
        scaling = (1.0 if alpha is None else alpha / rank) if facts is None else facts.scaling(key, rank)
        pairs[target] = LowRank(a, b, limits.check_scaling(what, scaling))
    return PeftAdapter(pairs, None if facts is None else replace(facts.rules, place=place))


def _by_expert(a: np.ndarray, b: np.ndarray, rank: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of all experts [X, r, K] and [X, N, r], of PEFT's A [X r, K], which goes by expert and then rank, and B
    [N, r X], by rank and then expert."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] % rank:
        raise BadModelFile(
            f"{what}: A is {list(a.shape)} and B {list(b.shape)}; with rank {rank} for each expert they must be "
            f"[experts × {rank}, inputs] and [outputs, {rank} × experts]"
        )
    experts = a.shape[0] // rank
    return a.reshape(experts, rank, -1), np.ascontiguousarray(b.reshape(len(b), rank, experts).transpose(2, 0, 1))


def _stranger(name: str, where: str) -> Exception:
    """The error for a tensor that is not LoRA of one of the decoder's linear layers."""
    kinds = {
        "lora_embedding": "LoRA of embeddings",
        "lora_magnitude_vector": "DoRA",
        "token_adapter": "trainable tokens",
    }
    if re.search(r"(?:lm_head|embed_tokens)(?:\.base_layer)?\.weight$", name):
        return Unsupported(
            f"{where}: the tensor {short_repr(name)} replaces weights of the model, which is not supported; where they "
            f"are the model's own, save the adapter with save_embedding_layers=False, otherwise {MERGE}"
        )
    for part, kind in kinds.items():
        if part in name:
            return Unsupported(f"{where}: the tensor {short_repr(name)} is for {kind}, which is not supported; {MERGE}")
    if ".lora_" not in name:
        return Unsupported(
            f"{where}: the tensor {short_repr(name)} replaces weights of the model (modules_to_save), which is not "
            f"supported; {MERGE}"
        )
    return Unsupported(
        f"{where}: the tensor {short_repr(name)} is for none of a decoder's linear layers (such as "
        f"model.layers.0.self_attn.q_proj, or {HEADS[0]}); {MERGE}"
    )


MERGE = "merge the adapter into the weights, or train it on linear layers alone"


class _Config:
    """adapter_config.json, checked."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._where = f"{where}: {CONFIG}"
        self._matcher = Patterns(self._where)
        kind = config.get("peft_type", "LORA")
        kind = getattr(kind, "value", kind)
        if kind != "LORA":
            raise Unsupported(f"{self._where} has peft_type {short_repr(kind)}; only LORA is supported")
        for field, meaning in REFUSED.items():
            if config.get(field):
                raise Unsupported(
                    f"{self._where} has {field}={short_repr(config[field])}: {meaning}, which is not supported; {MERGE}"
                )
        if config.get("bias", "none") != "none":
            raise Unsupported(f"{self._where} has bias={short_repr(config['bias'])}; only 'none' is supported; {MERGE}")
        begin = config.get("init_lora_weights", True)
        if isinstance(begin, str) and begin.startswith(OTHER_BASE):
            raise Unsupported(
                f"{self._where} has init_lora_weights={short_repr(begin)}, which changes the base weights; save the "
                "adapter with path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
            )
        self._rank = self._integer(config.get("r", 8), "r")
        self._alpha = self._number(config.get("lora_alpha", 8), "lora_alpha")
        self._ranks = {
            key: self._integer(value, "rank_pattern") for key, value in self._patterns(config, "rank_pattern")
        }
        self._alphas = {key: self._number(v, "alpha_pattern") for key, v in self._patterns(config, "alpha_pattern")}
        self._rslora = self._flag(config.get("use_rslora", False), "use_rslora")
        self.rules = self._rules(config)

    def scaling(self, module: str, rank: int) -> float:
        """The scaling of a module, whose tensors must have the rank that the config says."""
        if not (self.rules.has(module, self._matcher) or self.rules.has_parameter(module)):
            raise BadModelFile(f"{self._where} does not target {module}, and there are tensors for it")
        expected = self.rank(module)
        if rank != expected:
            raise BadModelFile(f"{self._where} gives {module} rank {expected}, and its tensors have rank {rank}")
        alpha = self._alphas.get(self._matcher.key_of(self._alphas, module), self._alpha)
        return alpha / (math.sqrt(rank) if self._rslora else rank)

    def rank(self, module: str) -> int:
        """The rank that the config says for a module or a parameter."""
        return self._ranks.get(self._matcher.key_of(self._ranks, module), self._rank)

    def key(self, module: str) -> str:
        """The name of the module, or of its parameter, by which the config knows LoRA of a module's name."""
        weight = f"{module}.weight"
        return self.parameter(module) or (weight if self.rules.has_parameter(weight) else module)

    def parameter(self, module: str) -> str | None:
        """The parameter that LoRA of a module's name is of, None if it is of the module itself.

        PEFT puts several of one module around each other: the first is the innermost.
        """
        inner = module.removesuffix(".base_layer")
        if not inner.endswith(".experts"):  # others have modules of these names
            return None
        around = (len(module) - len(inner)) // len(".base_layer")
        names = [name for name in OF_EXPERTS if self.rules.has_parameter(f"{inner}.{name}")]
        if around >= len(names):
            return None
        return f"{inner}.{names[len(names) - 1 - around]}"

    def _rules(self, config: Mapping[str, Any]) -> TargetRules:
        modules, excluded = config.get("target_modules"), config.get("exclude_modules")
        parameters = self._parameters(config.get("target_parameters") or ())
        if parameters and modules is None:
            modules = ()
        if modules is None or modules == "":
            raise BadModelFile(f"{self._where} has no target_modules; it must name modules, as a list or a pattern")
        layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
        if isinstance(layers, int) and not isinstance(layers, bool):
            layers = [layers]
        if layers is not None and not isinstance(layers, list | tuple | set):
            raise BadModelFile(
                f"{self._where} has layers_to_transform={short_repr(layers)}; a list of integers is needed"
            )
        listed = [patterns] if isinstance(patterns, str) else patterns or ()
        if not isinstance(listed, list | tuple | set):
            raise BadModelFile(f"{self._where} has layers_pattern={short_repr(patterns)}; a list of names is needed")
        return TargetRules(
            modules=self._names(modules, "target_modules"),
            excluded=self._names(excluded or (), "exclude_modules"),
            layers=frozenset(self._integer(l, "layers_to_transform", 0) for l in layers) if layers else None,
            layers_patterns=tuple(self._pattern(p, "layers_pattern") for p in listed if p),
            parameters=parameters,
        )

    def _parameters(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
            raise BadModelFile(
                f"{self._where} has target_parameters={short_repr(value)}; a list of names of parameters is needed"
            )
        for name in value:
            if name.rpartition(".")[2] not in (*OF_EXPERTS, "weight"):
                raise Unsupported(
                    f"{self._where} has {short_repr(name)} in target_parameters; LoRA of matrices is supported "
                    f"({', '.join(OF_EXPERTS)}, weight), of others it is not; {MERGE}"
                )
        return tuple(sorted(value))

    def _names(self, value: Any, field: str) -> str | tuple[str, ...]:
        if isinstance(value, str):
            return value if value.lower() == "all-linear" else self._pattern(value, field)
        if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
            raise BadModelFile(f"{self._where} has {field}={short_repr(value)}; a pattern or a list of names is needed")
        return tuple(sorted(value))

    def _patterns(self, config: Mapping[str, Any], field: str) -> Iterable[tuple[str, Any]]:
        value = config.get(field) or {}
        if not isinstance(value, Mapping):
            raise BadModelFile(f"{self._where} has {field}={short_repr(value)}; an object is needed")
        if len(value) > MAX_PATTERNS:
            raise BadModelFile(f"{self._where} has {len(value)} patterns in {field}; the limit is {MAX_PATTERNS}")
        return [(self._pattern(key, field), number) for key, number in value.items()]

    def _pattern(self, value: Any, field: str) -> str:
        """A regular expression that ends in time on any module's name."""
        if not isinstance(value, str) or len(value) > MAX_PATTERN:
            raise BadModelFile(
                f"{self._where} has {field} {short_repr(value)}; it takes a pattern of {MAX_PATTERN} characters at most"
            )
        try:
            self._matcher.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise BadModelFile(f"{self._where} has {field} {short_repr(value)}: {error}") from None
        if len(REPEATS.findall(value)) > MAX_REPEATS or re.search(r"\)(?:[*+]|\{)", value):
            raise Unsupported(
                f"{self._where} has {field} {short_repr(value)}; a pattern may repeat {MAX_REPEATS} times, and "
                "no group, or it could take for ever: list the modules"
            )
        return value

    def _integer(self, value: Any, field: str, low: int = 1) -> int:
        try:
            return check_integer(value, field, low)
        except (TypeError, ValueError, IndexError) as error:
            raise BadModelFile(f"{self._where}: {error}") from None

    def _number(self, value: Any, field: str) -> float:
        try:
            return check_number(value, field)
        except (TypeError, ValueError) as error:
            raise BadModelFile(f"{self._where}: {error}") from None

    def _flag(self, value: Any, field: str) -> bool:
        if not isinstance(value, bool):
            raise BadModelFile(f"{self._where}: {field} is {short_repr(value)}; it must be true or false")
        return value
