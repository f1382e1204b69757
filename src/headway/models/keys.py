"""Typed access to the keys of a config.json or of GGUF metadata, with errors that name the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from headway.base.errors import BadModelFile, Unsupported

FINITE = sys.float_info.max
WHOLE = 1 << 63
LARGEST = 1 << 24  # larger than any dimension of a real model

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Keys that change what a model computes, and the values that do not. A family that does not read one refuses it.
MEANINGFUL: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None, 0.0),
    "attn_temperature_tuning": (None, False),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
    "kv_lora_rank": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "qk_layernorm": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1.0),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_parallel_residual": (None, False),
    "use_qk_norm": (None, False),
    # of GGUF files
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "residual_scale": (0.0, 1.0),
}


class Keys:
    """One source of keys. `names` says how this source spells a key that others spell otherwise."""

    def __init__(
        self, data: Mapping[str, Any], source: str, prefix: str = "", names: Mapping[str, str] | None = None
    ) -> None:
        self.data, self.source, self.prefix, self.names = data, source, prefix, names or {}
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """The key as this source spells it."""
        return self.prefix + self.names.get(key, key)

    def has(self, key: str) -> bool:
        return self.name(key) in self.data

    def get(self, key: str) -> Any:
        self._read.add(self.name(key))
        return self.data.get(self.name(key))

    def int(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not -WHOLE <= value < WHOLE:
            raise BadModelFile(f"{self.source}: {self.name(key)} is {value!r}; it must be an integer")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= FINITE:
            raise BadModelFile(f"{self.source}: {self.name(key)} is {value!r}; it must be a finite number")
        return float(value)

    def optional(self, key: str) -> float | None:
        value = None if self.get(key) is None else self.float(key)
        if value is not None and abs(value) > LARGEST:
            raise BadModelFile(f"{self.source}: {self.name(key)} is {value}; its size must be at most {LARGEST}")
        return value

    def bool(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise BadModelFile(f"{self.source}: {self.name(key)} is {value!r}; it must be true or false")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.float(key, default)
        if not 0 < value <= LARGEST:
            raise BadModelFile(f"{self.source}: {self.name(key)} is {value}; it must be above 0 and at most {LARGEST}")
        return value

    def cap(self, key: str) -> float | None:
        """A soft cap: null is none."""
        return None if self.get(key) is None else self.positive(key)

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.int(key, default)
        if not least <= value <= LARGEST:
            raise BadModelFile(f"{self.source}: {self.name(key)} is {value}; it must be between {least} and {LARGEST}")
        return value

    def choice(self, key: str, default: str, known: Mapping[str, str]) -> str:
        """What the value of a key stands for."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in known:
            raise Unsupported(
                f"{self.source}: {self.name(key)} is {value!r}; supported are {', '.join(dict.fromkeys(known))}"
            )
        return known[value]

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        return self.choice(key, default, ACTIVATIONS)

    def check_silu(self, family: str) -> None:
        """Raise for another activation than silu."""
        if (act := self.activation()) != "silu":
            raise Unsupported(f"{self.source}: hidden_act is {act!r}; the {family} family has silu alone")

    def per_layer(self, key: str, layers: int, known: Mapping[Any, Any]) -> tuple[Any, ...] | None:
        """What the entries of a list with one for each layer stand for; None if there is no list."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != layers or any(v not in list(known) for v in values):
            names = ", ".join(map(str, known))
            raise BadModelFile(
                f"{self.source}: {self.name(key)} must name one of {names} for each of {layers} layers, not {values!r}"
            )
        return tuple(known[value] for value in values)

    def check_all_understood(self, family: str) -> None:
        """Raise for a key that changes what a model computes and that nobody has read: another family's."""
        for key, neutral in MEANINGFUL.items():
            name = self.prefix + key
            if name in self.data and name not in self._read and self.data[name] not in neutral:
                raise Unsupported(
                    f"{self.source}: {name} is {self.data[name]!r}, which the {family} family does not have; the "
                    "config mixes families"
                )

    def _default(self, key: str, default: Any) -> Any:
        if default is None:
            raise BadModelFile(f"{self.source} has no key {self.name(key)!r}, which this architecture needs")
        return default
