"""The generation parameters of models that run transformers' own `generate`: encoder-decoders, captioners, speech.

Parameters are checked before anything runs and merged with the model's own files. A maximum length is always passed,
even if the model's files leave it open.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.specs.generation import WITHOUT_BEAMS
from headway.base.text import short_repr
from headway.pipelines.task import TaskOptions

NEW_TOKENS = 256  # the maximum if neither the call nor the model's files set one
PROMPT = 1  # tokens the decoder starts from
Check = tuple[Callable[[Any], bool], str]  # whether a value is valid, and a description of valid ones


@dataclass(frozen=True)
class DecodingOptions(TaskOptions):
    """The generation parameters that every model takes. None means the value of the model's own files."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    num_return_sequences: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class GenerationOptions(DecodingOptions):
    """The parameters of transformers' own `generate`.

    `seed` makes sampling repeatable: every item samples as `torch.manual_seed(seed); model.generate(item)` does alone.
    """

    encoder_repetition_penalty: float | None = None
    encoder_no_repeat_ngram_size: int | None = None
    suppress_tokens: Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    decoder_start_token_id: int | None = None
    renormalize_logits: bool | None = None
    use_cache: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (valid, description) in _CHECKS.items():
            value = getattr(self, name)
            if value is not None and not valid(value):
                raise InvalidInput(
                    f"{name} is {short_repr(value)}; it must be {description}, or None for the model's own"
                )
            if isinstance(value, list):  # options must be hashable
                object.__setattr__(self, name, _frozen(value))
        if self.max_new_tokens is not None and self.max_length is not None:
            raise InvalidInput(
                f"max_new_tokens is {self.max_new_tokens} and max_length is {self.max_length}; pass one of them "
                "(max_length counts the decoder's start token)"
            )
        if self.min_new_tokens is not None and self.min_length is not None:
            raise InvalidInput(
                f"min_new_tokens is {self.min_new_tokens} and min_length is {self.min_length}; pass one of them"
            )


# -- values ------------------------------------------------------------------------------------------------------------


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    kind = isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind and abs(value) <= sys.float_info.max  # neither nan, nor infinite, nor an integer that no float can be


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(_is_int(one, 0) for one in value)


def _are_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(_are_ids, value))


def _integer(least: int, more: str = "") -> Check:
    return (lambda value: _is_int(value, least)), f"an integer of at least {least}{more}"


def _between(least: float, most: float, what: str, *, open_below: bool = False) -> Check:
    def valid(value: Any) -> bool:
        return _is_number(value) and least <= value <= most and not (open_below and value == least)

    return valid, what


_BOOL: Check = _is_bool, "True or False"
_PROBABILITY = _between(0, 1, "a number above 0 and at most 1", open_below=True)
_CUTOFF: Check = (lambda value: _is_number(value) and 0 <= value < 1), "a number of at least 0 and below 1"
_POSITIVE = _between(0, math.inf, "a number above 0", open_below=True)
_ONE_OR_MORE: Check = (lambda value: _is_int(value, 0) or _are_ids(value)), "a token id or a list of them"

_CHECKS: dict[str, Check] = {
    "max_new_tokens": _integer(1),
    "max_length": _integer(PROMPT + 1),
    "min_length": _integer(0),
    "min_new_tokens": _integer(0),
    "do_sample": _BOOL,
    "temperature": _between(0, math.inf, "a number above 0 (do_sample=False takes the likeliest)", open_below=True),
    "top_k": _integer(0, " (0: no limit)"),
    "top_p": _PROBABILITY,
    "min_p": _between(0, 1, "a number from 0 to 1"),
    "typical_p": _PROBABILITY,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "num_beams": _integer(1),
    "length_penalty": (_is_number, "a number"),
    "early_stopping": (
        (lambda value: _is_bool(value) or (isinstance(value, str) and value == "never")),
        "True, False or 'never'",
    ),
    "num_return_sequences": _integer(1),
    "repetition_penalty": _POSITIVE,
    "no_repeat_ngram_size": _integer(0),
    "encoder_repetition_penalty": _POSITIVE,
    "encoder_no_repeat_ngram_size": _integer(0),
    "bad_words_ids": (_are_words, "a list of lists of token ids"),
    "suppress_tokens": (_are_ids, "a list of token ids"),
    "forced_bos_token_id": _integer(0),
    "forced_eos_token_id": _ONE_OR_MORE,
    "decoder_start_token_id": _integer(0),
    "eos_token_id": _ONE_OR_MORE,
    "pad_token_id": _integer(0),
    "renormalize_logits": _BOOL,
    "use_cache": _BOOL,
    "seed": ((lambda value: _is_int(value, 0) and value < 1 << 63), "an integer in [0, 2**63)"),
}
IDS = ("bad_words_ids", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id")
NAMES = frozenset(_CHECKS)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, (list, tuple)) else value


def _thawed(value: Any) -> Any:
    return [_thawed(one) for one in value] if isinstance(value, tuple) else value


# -- the keywords of model.generate ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GenerationSettings:
    """A model's generation settings: from its files, with the limits of its decoder.

    `own` are the defaults of `model.generate` itself; `task` are those that the model's files have for one task only.
    """

    own: Mapping[str, Any]
    task: Mapping[str, Any]
    positions: int | None
    vocab: int

    def keywords(self, options: GenerationOptions) -> dict[str, Any]:
        """The keywords of `model.generate` for these options; meaningless combinations are an error."""
        given = {name: getattr(options, name) for name in NAMES - {"seed"} if getattr(options, name) is not None}
        merged = {name: value for name, value in self.defaults.items() if value is not None} | given
        self._check_ids(given)
        _check_sampling(given, merged, options.seed)
        _check_beams(given, merged)
        plain = {name: _thawed(value) for name, value in given.items()}
        return {**self.task, **plain, **self._lengths(given)}

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {**self.own, **self.task}

    def eos_ids(self, options: GenerationOptions) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        eos = options.eos_token_id if options.eos_token_id is not None else self.defaults.get("eos_token_id")
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def depends_on_source_tokens(self, options: GenerationOptions) -> bool:
        """Whether the source's token ids, padding included, restrict what may be generated."""
        size = self._effective(options, "encoder_no_repeat_ngram_size")
        return bool(size) or self._effective(options, "encoder_repetition_penalty") not in (None, 1, 1.0)

    def new_tokens(self, options: GenerationOptions) -> int:
        """The maximum number of new tokens."""
        longest = self._longest({name: getattr(options, name) for name in ("max_new_tokens", "max_length")})
        return longest["max_new_tokens"] or longest["max_length"] - PROMPT

    def samples(self, options: GenerationOptions) -> bool:
        """Whether tokens are sampled."""
        return bool(self._effective(options, "do_sample"))

    def _effective(self, options: GenerationOptions, name: str) -> Any:
        value = getattr(options, name)
        return value if value is not None else self.defaults.get(name)

    def _lengths(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All four lengths, so that those of the call never mix with those of the model's files."""
        longest, shortest = self._longest(given), self._shortest(given)
        most = longest["max_new_tokens"] or longest["max_length"] - PROMPT
        least = shortest["min_new_tokens"] or (shortest["min_length"] or 0) - PROMPT
        if self.positions is not None and most + PROMPT > self.positions:
            raise InvalidInput(
                f"{_describe(longest)}, and the model's decoder has {self.positions} positions, one of them for its "
                f"start token; ask for at most {self.positions - PROMPT} new tokens"
            )
        if least > most:
            raise InvalidInput(
                f"{_describe(shortest)} and {_describe(longest)}; lower the minimum or raise the maximum"
            )
        return longest | shortest

    def _longest(self, given: Mapping[str, Any]) -> dict[str, Any]:
        for source in (given, self.task, self.own):
            for name in ("max_new_tokens", "max_length"):
                if source.get(name) is not None:
                    return {"max_new_tokens": None, "max_length": None, name: source[name]}
        room = NEW_TOKENS if self.positions is None else min(NEW_TOKENS, self.positions - PROMPT)
        return {"max_new_tokens": room, "max_length": None}

    def _shortest(self, given: Mapping[str, Any]) -> dict[str, Any]:
        for source in (given, self.task, self.own):
            for name in ("min_new_tokens", "min_length"):
                if source.get(name) is not None:
                    return {"min_new_tokens": None, "min_length": None, name: source[name]}
        return {"min_new_tokens": None, "min_length": None}

    def _check_ids(self, given: Mapping[str, Any]) -> None:
        for name in (*IDS, "eos_token_id", "pad_token_id"):
            for id in _flat(given.get(name)):
                if id >= self.vocab:
                    raise InvalidInput(f"{name} has the token {id}; the model's ids are 0 to {self.vocab - 1}")


def _describe(lengths: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} is {value}" for name, value in lengths.items() if value is not None)


def _flat(value: Any) -> list[int]:
    if value is None or isinstance(value, int):
        return [] if value is None else [value]
    return [id for one in value for id in _flat(one)]


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def _check_sampling(given: Mapping[str, Any], merged: Mapping[str, Any], seed: int | None) -> None:
    if merged.get("do_sample"):
        return
    for name in SAMPLING:
        if name in given:
            raise InvalidInput(f"{name} is {given[name]!r} and do_sample is not set; pass do_sample=True too")
    if seed is not None:
        raise InvalidInput(f"seed is {seed} and do_sample is not set; pass do_sample=True too")


def _check_beams(given: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    beams, sequences = merged.get("num_beams", 1), merged.get("num_return_sequences", 1)
    if beams == 1:
        for name, off in WITHOUT_BEAMS.items():
            if given.get(name, off) not in (None, off):
                raise InvalidInput(f"{name} is {given[name]!r} and num_beams is 1; pass num_beams=2 or more too")
    if sequences > beams and (beams > 1 or not merged.get("do_sample")):
        way = f"num_beams={sequences}" + ("" if beams > 1 else " or do_sample=True")
        raise InvalidInput(f"num_return_sequences is {sequences} and num_beams is {beams}; pass {way} too")


def resolve_lengths(base: GenerationOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, and None for what it replaces in `base`: a call's max_length overrides a default max_new_tokens."""
    pairs = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
    rivals = {pair[1 - i]: None for pair in pairs for i in (0, 1) if given.get(pair[i]) is not None}
    return {**{name: None for name in rivals if getattr(base, name) is not None}, **given}


def generation_settings(module: Any, task: str) -> GenerationSettings:
    """The generation settings of `module` for a task of this name."""
    own = module.generation_config.to_dict()
    specific = (getattr(module.config, "task_specific_params", None) or {}).get(task) or {}
    positions = getattr(module.config, "max_decoder_position_embeddings", None)
    if positions is None:
        positions = getattr(module.config, "max_position_embeddings", None)
    named = {name: value for name, value in specific.items() if name in NAMES and value is not None}
    if "max_new_tokens" in named:
        named.pop("max_length", None)
    return GenerationSettings(own, named, positions, module.get_output_embeddings().weight.shape[0])
