"""The generation defaults of a model: generation_config.json, which its publisher puts next to the weights.

`GenerationDefaults` holds the file's values, None where the file has none. `.sampler(...)` turns them, with overrides,
into a sampler. Keys without a field here are in `.unknown`; those that would change the tokens are refused when a call
generates by the file. Values are checked by the table of parameters (`base/specs/generation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np

from headway.base.checks import check_token_id
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, InvalidInput, Unsupported, WrongType
from headway.base.files import read_json
from headway.base.specs.generation import PARAMETERS, parameters_of
from headway.base.specs.samplers import Sampling
from headway.base.text import short_repr
from headway.program.generation.word_bias import Biases, Words, check_bad_words, check_sequence_bias

FILE = "generation_config.json"
TOKENS = {"eos_token_id": "eos_ids", "bos_token_id": "bos_id", "pad_token_id": "pad_id"}  # names in the file, and ours
SAMPLED = (  # only these need do_sample
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip

# Keys that change the tokens and are not supported, each with the values that have no effect; null never has one.
ALWAYS: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
WHEN_SAMPLED: Mapping[str, tuple[Any, ...]] = {"top_h": ()}
WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "diversity_penalty": (0,),
    "num_beam_groups": (1,),
    "renormalize_logits": (False,),
}
WHEN_GREEDY: Mapping[str, tuple[Any, ...]] = {"penalty_alpha": (0,)}
UNSUPPORTED = frozenset({*ALWAYS, *WHEN_SAMPLED, *WITH_BEAMS, *WHEN_GREEDY})


@dataclass(frozen=True)
class GenerationDefaults:
    """Generation parameters, None where there is no default. Lengths named `…_length` count the prompt."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    bad_words_ids: Words | None = None
    sequence_bias: Biases | None = None
    no_repeat_ngram_size: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_return_sequences: int | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    eos_ids: tuple[int, ...] | None = None
    bos_id: int | None = None
    pad_id: int | None = None
    unknown: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(value, name))
        object.__setattr__(self, "unknown", MappingProxyType(dict(self.unknown)))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.given, unknown=dict(self.unknown)), ()

    @classmethod
    def from_folder(cls, path: str | Path | None) -> Self:
        """The file's values in a model's folder; none for a GGUF file or a model in memory."""
        if path is None or not Path(path).is_dir():
            return cls()
        file = Path(path) / FILE
        values, ours = read_json(file), {name: name for name in NAMES - set(TOKENS.values())} | TOKENS
        known = {ours[key]: value for key, value in values.items() if key in ours}
        unknown = {key: value for key, value in values.items() if key not in ours}
        if known.get("pad_id") == -1:
            known["pad_id"] = None  # older files write "none" like this
        try:
            return cls(**known, unknown=unknown)
        except (InvalidInput, WrongType) as error:
            raise BadModelFile(f"{file} cannot be used: {error}") from error

    def overridden(self, **overrides: Any) -> Self:
        """The same with other values; an override of None changes nothing."""
        if strange := sorted(set(overrides) - NAMES):
            raise InvalidInput(
                f"{short_repr(strange[0])} is not a generation parameter; expected {', '.join(sorted(NAMES))}"
            )
        return replace(self, **{name: value for name, value in overrides.items() if value is not None})

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that have a value, by name."""
        return {name: value for name in sorted(NAMES) if (value := getattr(self, name)) is not None}

    def value(self, name: str) -> Any:
        """A parameter's value, or the table's default where there is none."""
        value = getattr(self, name)
        return PARAMETERS[name].default if value is None else value

    def max_tokens(self, prompt: int) -> int | None:
        """How many tokens may follow the prompt, None without a limit. `max_new_tokens` takes precedence."""
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        if prompt >= self.max_length:
            raise InvalidInput(
                f"max_length is {self.max_length} and counts the prompt, which has {prompt} tokens already; "
                "give a larger one, or max_tokens"
            )
        return self.max_length - prompt

    def min_tokens(self, prompt: int) -> int:
        """How many tokens must come before an end token may. `min_new_tokens` takes precedence."""
        return max(0, (self.min_length or 0) - prompt) if self.min_new_tokens is None else self.min_new_tokens

    def sampler(
        self,
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | np.ndarray | None = None,
        seed: int | None = None,
        **overrides: Any,
    ) -> Sampling:
        """The sampler of these values, with `overrides` (None overrides nothing): greedy unless do_sample.

        A parameter without a value is off; `transformers` would draw among the 50 likeliest tokens: give `top_k=50` for
        that. `engine.generation_defaults.sampler(temperature=0.3)` is the model's own sampler at that temperature.
        """
        chosen = self.overridden(**overrides)
        chosen.check()
        given = [n for n in SAMPLED if overrides.get(n) is not None and (n, overrides[n]) != ("temperature", 0)]
        if given and not chosen.do_sample:
            named = f"{given[0]}={short_repr(overrides[given[0]])}"
            raise InvalidInput(f"{named} has no effect without sampling; give do_sample=True")
        drawing: dict[str, Any] = {"temperature": 0.0}
        if chosen.do_sample:
            drawing = {name: chosen.value(name) for name in SAMPLED}
        return Sampling(
            **drawing,
            repetition_penalty=chosen.value("repetition_penalty"),
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            seed=seed,
        )

    def unsupported(self) -> dict[str, Any]:
        """Unsupported keys of the file that would change the tokens, under these parameters."""
        tables = [ALWAYS]
        tables += [WHEN_SAMPLED] if self.do_sample else []
        tables += [WITH_BEAMS] if (self.num_beams or 1) > 1 else [] if self.do_sample else [WHEN_GREEDY]
        idle = {name: values for table in tables for name, values in table.items()}
        return {k: v for k, v in self.unknown.items() if k in idle and v is not None and v not in idle[k]}

    def check(self) -> None:
        """Raise if the file asks for something unsupported."""
        if unsupported := self.unsupported():
            named = ", ".join(f"{key}={short_repr(value)}" for key, value in unsupported.items())
            raise Unsupported(
                f"{FILE} asks for {named}, which is not supported; generate with a sampler of your own, "
                "or take it out of the file"
            )


def _ids(value: Any, name: str) -> tuple[int, ...]:
    return tuple(check_token_id(v, name) for v in (value if isinstance(value, list | tuple) else [value]))


CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    **{parameter.name_on("file"): parameter.check for parameter in parameters_of("file")},
    **{"bad_words_ids": check_bad_words, "sequence_bias": check_sequence_bias},
    **{"eos_ids": _ids, "bos_id": check_token_id, "pad_id": check_token_id},
}
NAMES = frozenset(CHECKS)
