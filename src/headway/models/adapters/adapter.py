"""An adapter: LoRA weights, read from a file or given as tensors. Immutable, and of no engine yet.

    Adapter ──bind──▶ BoundAdapter (checked against a model) ──runner──▶ what a device computes with

The engine loads it once and keeps it while somebody needs it (`runtime/adapters.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from headway.base.checks import check_integer, check_number
from headway.base.errors import ModelNotFound, Unsupported, WrongType
from headway.base.specs.adapters import OUTSIDE
from headway.base.text import short_repr
from headway.models.adapters import gguf, peft
from headway.models.adapters.low_rank import MAX_BYTES, MAX_RANK, ROLES, Limits, LowRank, Target, digest
from headway.models.adapters.target_rules import TargetRules


class Adapter:
    """LoRA weights for a model: `fwd.adapter(a)`, `ctx.generate(adapter=a)`.

        style = hw.Adapter.load("adapters/style")          # a PEFT folder, or a GGUF file of llama.cpp
        fresh = hw.Adapter.from_tensors(state_dict, config)

    Two adapters are the same when their weights are (`digest`), whatever they are called.
    """

    __slots__ = ("__weakref__", "architecture", "digest", "in_order", "name", "pairs", "rules")

    def __init__(
        self,
        pairs: Mapping[Target, LowRank],
        *,
        name: str = "",
        architecture: str | None = None,
        rules: TargetRules | None = None,
        in_order: bool = False,
    ) -> None:
        """Made by `load` and `from_tensors`.

        `architecture` is what a GGUF file says, whose names and rows are those of that architecture's GGUF files;
        `rules` what the config of a PEFT adapter says about its targets. With `in_order` its targets are a model's
        roles, and rows lie as a model computes with them, not as files have them.
        """
        self.pairs, self.name, self.architecture, self.rules = dict(pairs), name, architecture, rules
        self.in_order = in_order
        self.digest = digest(self.pairs, architecture or "", *(["in order"] if in_order else []))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_rank: int = MAX_RANK, max_bytes: int = MAX_BYTES) -> Adapter:
        """The adapter in a PEFT folder (adapter_config.json, adapter_model.safetensors) or a GGUF file of llama.cpp.

        Nothing in it can run code: pickles are refused.
        """
        if not isinstance(path, str | os.PathLike):
            raise WrongType(f"the path of an adapter is {short_repr(path)}; give a folder or a .gguf file")
        where, limits = Path(path), _limits(max_rank, max_bytes)
        if os.path.isdir(where):  # also for a name that no file can have
            file = peft.read_folder(where, limits)
            return cls(file.pairs, name=where.name, rules=file.rules)
        if os.path.isfile(where):
            pairs, architecture = gguf.read_file(where, limits)
            return cls(pairs, name=where.stem, architecture=architecture)
        raise ModelNotFound(
            f"there is no adapter at {short_repr(str(where))}; give a folder with {peft.CONFIG} and {peft.WEIGHTS}, "
            "or a .gguf file"
        )

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        *,
        alpha: float | None = None,
        name: str = "",
        max_rank: int = MAX_RANK,
        max_bytes: int = MAX_BYTES,
    ) -> Adapter:
        """An adapter of tensors in memory, by PEFT's names, as `get_peft_model_state_dict` gives them. It copies them.

        `config` is the adapter_config.json, or LoraConfig's `to_dict()`. Without one the scaling is alpha / rank of
        each target, or 1 without `alpha`.
        """
        if not isinstance(tensors, Mapping):
            raise WrongType(f"the tensors are {short_repr(tensors)}; give a dict from names to tensors")
        if config is not None and alpha is not None:
            raise WrongType("alpha was given with a config, which has it (lora_alpha); give one of them")
        if alpha is not None:
            alpha = check_number(alpha, "alpha")
        file = peft.read_tensors(tensors, config, alpha, _limits(max_rank, max_bytes))
        return cls(file.pairs, name=name, rules=file.rules)

    @property
    def rank(self) -> int:
        """The largest rank of its targets."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, as they were stored."""
        return sum(pair.nbytes for pair in self.pairs.values())

    def __repr__(self) -> str:
        inside = [target for target in self.pairs if target.layer != OUTSIDE]
        layers, named = len({target.layer for target in inside}), {target.part for target in inside}
        roles = ", ".join([*(role for role in ROLES if role in named), *sorted(named - set(ROLES))])
        parts = [f"{roles} of {layers} layers"] * (layers > 0)
        if outside := sorted(str(target) for target in self.pairs if target.layer == OUTSIDE):
            parts.append(", ".join(outside))
        return f"<Adapter {self.name!r}: rank {self.rank}, {' and '.join(parts)}, {self.digest[:12]}>"

    def __reduce__(self) -> NoReturn:
        raise Unsupported("an adapter cannot be pickled or copied; load it again where it is needed")


def _limits(max_rank: int, max_bytes: int) -> Limits:
    return Limits(check_integer(max_rank, "max_rank", 1, MAX_RANK), check_integer(max_bytes, "max_bytes", 1))
