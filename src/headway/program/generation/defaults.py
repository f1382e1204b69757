"""What a model's publisher says about generating with it: generation_config.json beside the weights, and nothing else.

`GenerationDefaults` holds what the file says; None is what it leaves open. `.sampler(...)` turns that, and what a
caller says instead, into a sampler. Keys that Headway has no field for are in `.unknown`; those that would change the
tokens are refused when somebody asks to generate by the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from headway.base.checks import check_integer, check_number, check_token_id
from headway.base.errors import BadModelFile, InvalidInput, Unsupported, WrongType
from headway.base.files import read_json
from headway.base.samplers import Sampling

FILE = "generation_config.json"
TOKENS = {"eos_token_id": "eos_ids", "bos_token_id": "bos_id", "pad_token_id": "pad_id"}  # names in the file, and ours
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p")  # fields that have a meaning with do_sample only

# Keys that change the tokens and are not supported, with the values that leave them alone; null always does.
ALWAYS: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
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
    "sequence_bias": ([], {}),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
WHEN_SAMPLED: Mapping[str, tuple[Any, ...]] = {"epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": ()}
WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "diversity_penalty": (0,),
    "num_beam_groups": (1,),
    "renormalize_logits": (False,),
}
WHEN_GREEDY: Mapping[str, tuple[Any, ...]] = {"penalty_alpha": (0,)}
UNSUPPORTED = frozenset({*ALWAYS, *WHEN_SAMPLED, *WITH_BEAMS, *WHEN_GREEDY})


@dataclass(frozen=True)
class GenerationDefaults:
    """Generation options, each None where nothing is said. Lengths named `…_length` count the prompt."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
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
        if said := {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}:
            Sampling(**said)

    @classmethod
    def from_folder(cls, path: str | Path | None) -> Self:
        """What the file in a model's folder says; nothing for a GGUF file, which has none, or a model in memory."""
        if path is None or not Path(path).is_dir():
            return cls()
        file = Path(path) / FILE
        said, ours = read_json(file), {name: name for name in NAMES - set(TOKENS.values())} | TOKENS
        known = {ours[key]: value for key, value in said.items() if key in ours}
        unknown = {key: value for key, value in said.items() if key not in ours}
        if known.get("pad_id") == -1:
            known["pad_id"] = None  # how older files write that there is none
        try:
            return cls(**known, unknown=MappingProxyType(unknown))
        except (InvalidInput, WrongType) as error:
            raise BadModelFile(f"{file} cannot be used: {error}") from error

    def overridden(self, **overrides: Any) -> Self:
        """The same with other values; None leaves what is there."""
        if strange := sorted(set(overrides) - NAMES):
            raise InvalidInput(f"{strange[0]!r} is no generation option; there are {', '.join(sorted(NAMES))}")
        return replace(self, **{name: value for name, value in overrides.items() if value is not None})

    @property
    def given(self) -> dict[str, Any]:
        """What is said, by name."""
        return {name: value for name in sorted(NAMES) if (value := getattr(self, name)) is not None}

    def max_tokens(self, prompt: int) -> int | None:
        """How many tokens may follow a prompt of this length; None where nothing says. `max_new_tokens` goes first."""
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        if prompt >= self.max_length:
            raise InvalidInput(
                f"max_length is {self.max_length} and counts the prompt, which has {prompt} tokens already; "
                "give a larger one, or max_tokens"
            )
        return self.max_length - prompt

    def min_tokens(self, prompt: int) -> int:
        """How many tokens must follow a prompt of this length before an end token may. `min_new_tokens` goes first."""
        return max(0, (self.min_length or 0) - prompt) if self.min_new_tokens is None else self.min_new_tokens

    def sampler(
        self,
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        seed: int | None = None,
        **overrides: Any,
    ) -> Sampling:
        """The sampler that is described here, with `overrides` in their place (None is none): greedy unless do_sample.

        What nobody says stays off. `transformers` would then keep the 50 best tokens of a draw; give `top_k=50` for
        that. `engine.generation_defaults.sampler(temperature=0.3)` is the model's own sampler, cooler.
        """
        chosen = self.overridden(**overrides)
        chosen.check()
        given = [n for n in SAMPLED if overrides.get(n) is not None and (n, overrides[n]) != ("temperature", 0)]
        if given and not chosen.do_sample:
            named = f"{given[0]}={overrides[given[0]]!r}"
            raise InvalidInput(f"{named} has no meaning without sampling; give do_sample=True")
        knobs: dict[str, Any] = {"temperature": 0.0}
        if chosen.do_sample:
            knobs = {name: value for name in SAMPLED if (value := getattr(chosen, name)) is not None}
        return Sampling(
            **knobs,
            repetition_penalty=1.0 if chosen.repetition_penalty is None else chosen.repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            seed=seed,
        )

    def unsupported(self) -> dict[str, Any]:
        """Keys of the file that would change the tokens in this way of generating, and cannot be followed."""
        tables = [ALWAYS]
        tables += [WHEN_SAMPLED] if self.do_sample else []
        tables += [WITH_BEAMS] if (self.num_beams or 1) > 1 else [] if self.do_sample else [WHEN_GREEDY]
        idle = {name: values for table in tables for name, values in table.items()}
        return {k: v for k, v in self.unknown.items() if k in idle and v is not None and v not in idle[k]}

    def check(self) -> None:
        """Raise where the file asks for what Headway cannot do."""
        if found := self.unsupported():
            named = ", ".join(f"{key}={value!r:.60}" for key, value in found.items())
            raise Unsupported(
                f"{FILE} asks for {named}, which is not supported; generate with a sampler of your own, "
                "or take it out of the file"
            )


# -- checking ------------------------------------------------------------------------------------------------------


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise WrongType(f"{name} is {value!r:.60}; it takes true or false")
    return value


def _early(value: Any, name: str) -> bool | Literal["never"]:
    if not isinstance(value, bool) and value != "never":
        raise InvalidInput(f"{name} is {value!r:.60}; it takes true, false or 'never'")
    return value


def _above_0(value: Any, name: str) -> float:
    if (number := check_number(value, name)) <= 0:
        raise InvalidInput(f"{name} is {number}; it must be above 0 (1 turns it off)")
    return number


def _count(value: Any, name: str) -> int:
    return check_integer(value, name, low=1)


def _ids(value: Any, name: str) -> tuple[int, ...]:
    return tuple(check_token_id(v, name) for v in (value if isinstance(value, list | tuple) else [value]))


CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    "do_sample": _flag,
    "temperature": check_number,
    "top_k": check_integer,
    "top_p": check_number,
    "min_p": check_number,
    "typical_p": check_number,
    "repetition_penalty": _above_0,
    "no_repeat_ngram_size": check_integer,
    "num_beams": _count,
    "length_penalty": check_number,
    "early_stopping": _early,
    "num_return_sequences": _count,
    "max_length": _count,
    "max_new_tokens": _count,
    "min_length": check_integer,
    "min_new_tokens": check_integer,
    "eos_ids": _ids,
    "bos_id": check_token_id,
    "pad_id": check_token_id,
}
NAMES = frozenset(f.name for f in fields(GenerationDefaults)) - {"unknown"}
