"""The options of the text-generation pipeline, by the names they have in transformers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from headway.base.checks import check_integer, check_token_id
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.specs.logits_rules import BREAKERS, LogitsRuleValues, check_breakers
from headway.base.specs.logits_rules import NAMES as RULES
from headway.base.text import short_repr
from headway.pipelines.arguments import checked
from headway.pipelines.generation.generate import merge_generate_kwargs
from headway.pipelines.generation.options import DecodingOptions, resolve_lengths
from headway.pipelines.task import check_text
from headway.program.generation.word_bias import check_bad_words, check_sequence_bias

RETURNS = ("return_full_text", "return_text", "return_tensors")


@dataclass(frozen=True)
class TextGenerationOptions(DecodingOptions):
    """Generation parameters; None means the model's generation_config.json. `return_full_text` includes the prompt.

    `max_length` and `min_length` count the prompt, `max_new_tokens` and `min_new_tokens` do not. `stop` ends a text
    before a string; `stop_strings` and `stop_sequence`, as in transformers, after it. `eos_token_id` replaces the
    model's own. `return_tensors` gives `generated_token_ids`, those of the prompt included. A chat that ends with an
    assistant's message is continued, unless `continue_final_message=False`. Names of special tokens in a text are
    those tokens, as in transformers.
    """

    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any] | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    stop: str | Sequence[str] = ()
    stop_strings: str | Sequence[str] | None = None
    stop_sequence: str | Sequence[str] | None = None
    return_full_text: bool | None = None
    return_text: bool | None = None
    return_tensors: bool | None = None
    continue_final_message: bool | None = None
    prefix: str | None = None
    skip_special_tokens: bool | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, check in (("bad_words_ids", check_bad_words), ("sequence_bias", check_sequence_bias)):
            if (words := getattr(self, name)) is not None:  # options must be hashable
                object.__setattr__(self, name, check(words))
        LogitsRuleValues.of({name: getattr(self, name) for name in RULES})
        if self.dry_sequence_breakers is not None:
            object.__setattr__(self, BREAKERS, check_breakers(self.dry_sequence_breakers))
        for name in (*RETURNS, "continue_final_message"):
            checked(getattr(self, name), (None, True, False), name, "it takes True or False")
        kinds = [
            name for name in ("return_full_text", "return_text", "return_tensors") if getattr(self, name) is not None
        ]
        if len(kinds) > 1:
            raise InvalidInput(f"{kinds[0]} and {kinds[1]} were both given; pass one of them")
        if self.return_text is False:
            raise InvalidInput("return_text is False; pass return_tensors=True for token ids instead of text")
        if self.batch_size is not None:
            check_integer(self.batch_size, "batch_size", 1)
        for id in self.eos_ids or ():
            check_token_id(id, "eos_token_id")
        if self.pad_token_id is not None:
            check_token_id(self.pad_token_id, "pad_token_id")
        for name in ("stop_strings", "stop_sequence"):
            if (value := getattr(self, name)) is not None and not isinstance(value, (str, list, tuple)):
                raise WrongType(f"{name} is {short_repr(value)}; it must be a string or a list of strings")
        for text in (*self.ends_after, "" if self.prefix is None else self.prefix):
            check_text(text, "a stop string or prefix")
        if "" in self.ends_after:
            raise InvalidInput("a stop string is empty; it must have at least one character")

    @property
    def eos_ids(self) -> tuple[int, ...] | None:
        """The end tokens of this call, None for the model's own."""
        ids = self.eos_token_id
        return None if ids is None else tuple(ids) if isinstance(ids, Sequence) else (ids,)

    @property
    def ends_after(self) -> tuple[str, ...]:
        """The strings after which a text ends."""
        both = (self.stop_strings or (), self.stop_sequence or ())
        return tuple(text for some in both for text in ([some] if isinstance(some, str) else some))

    def keywords(self) -> dict[str, Any]:
        """The keywords of `ctx.generate`, without what ends a text."""
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        given = {name: getattr(self, name) for name in PARAMETERS}
        renamed = {names.get(name, name): value for name, value in given.items() if value is not None}
        return renamed | {"stop_only": True}


ELSEWHERE = {"eos_token_id", "pad_token_id", "seed"}  # what ends a text, what rows are padded with, the context's seed
PARAMETERS = (
    "sequence_bias",
    *RULES,
    *(f.name for f in dataclasses.fields(DecodingOptions) if f.name not in ELSEWHERE),
)


HOOK = "use hw.Engine and ctx.generate(logits=hook)"
CONSTRAIN = "use hw.Engine and ctx.generate(constrain=...)"
STEPS = "use hw.Engine and end the loop over the steps of ctx.generate(...)"
DRAFT = "use hw.Engine and ctx.generate(speculate=...)"
DIVERSE = "use hw.Engine and the program for diverse beams in docs/gallery.md"
NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "suppress_tokens": ((None,), "use bad_words_ids=[[id], ...]"),
    "begin_suppress_tokens": ((None,), HOOK),
    "forced_bos_token_id": ((None,), HOOK),
    "forced_eos_token_id": ((None,), HOOK),
    "exponential_decay_length_penalty": ((None,), HOOK),
    "guidance_scale": ((None, 1), HOOK),
    "logits_processor": ((None,), HOOK),
    "penalty_alpha": ((None, 0), HOOK),
    "negative_prompt_ids": ((None,), HOOK),
    "remove_invalid_values": ((None, False), HOOK),
    "renormalize_logits": ((None, False), HOOK),
    "constraints": ((None,), CONSTRAIN),
    "force_words_ids": ((None,), CONSTRAIN),
    "prefix_allowed_tokens_fn": ((None,), CONSTRAIN),
    "max_time": ((None,), STEPS),
    "stopping_criteria": ((None,), STEPS),
    "streamer": ((None,), "use hw.Engine and print the texts of the steps of ctx.generate(...)"),
    "prompt_lookup_num_tokens": ((None,), DRAFT),
    "assistant_model": ((None,), DRAFT),
    "diversity_penalty": ((None, 0), DIVERSE),
    "num_beam_groups": ((None, 1), DIVERSE),
    "custom_generate": ((None,), "use hw.Engine and a program of your own"),
    "cache_implementation": ((None, "dynamic", "static"), "leave it out: there is one KV cache for all"),
    "low_memory": ((None, True, False), "leave it out"),
    "disable_compile": ((None, True, False), "leave it out"),
    "synced_gpus": ((None, False), "leave it out"),
    **dict.fromkeys(
        ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
        ((None, False), "call .generate(...), which has them"),
    ),
}
"""Parameters of transformers' `generate` that this task lacks: the values that change nothing, and what to use."""


def merged_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call, with those of `generation_config` and `generate_kwargs`; idle ones are checked only."""
    options = merge_generate_kwargs(given)
    config = options.pop("generation_config", None)
    if config is not None:
        if not hasattr(config, "to_diff_dict"):
            raise WrongType(f"generation_config is a {type(config).__name__}; it must be a GenerationConfig")
        values = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
        options = {**values, **options}
    options.pop("tokenizer", None)  # transformers needs it for stop_strings; the model's own is used here
    checked(options.pop("use_cache", None), (None, True, False), "use_cache", "leave it out")
    checked(options.pop("clean_up_tokenization_spaces", None), (None, False), "clean_up_tokenization_spaces",
            "clean the text yourself")  # fmt: skip
    checked(options.pop("add_special_tokens", None), (None, True), "add_special_tokens",
            "use hw.Engine and ctx.fill(ids)")  # fmt: skip
    checked(options.pop("truncation", None), (None, False), "truncation", "cut the text before")
    checked(options.pop("handle_long_generation", None), (None,), "handle_long_generation", "cut the text before")
    for name, (idle, instead) in NOT_HERE.items():
        value = options.pop(name, None)
        if type(value) not in (int, float) or value not in idle:
            checked(value, idle, name, instead)
    for name in ("tools", "documents"):
        checked(options.pop(name, None), (None,), name, "use hw.Engine and ctx.chat(...)")
    return options


def settled_lengths(base: TextGenerationOptions, given: dict[str, Any]) -> dict[str, Any]:
    """As in transformers: of two maxima the one without the prompt decides, and what a call gives replaces defaults."""
    for new, whole in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        if given.get(new) is not None and given.get(whole) is not None:
            shown = f"{new}={short_repr(given[new])} decides; {whole}={short_repr(given[whole])} has no effect"
            warnings.warn(shown, stacklevel=4)
            given = {name: value for name, value in given.items() if name != whole}
    if any(given.get(name) is not None for name in RETURNS):
        given = {**dict.fromkeys((name for name in RETURNS if getattr(base, name) is not None), None), **given}
    return resolve_lengths(base, given)  # type: ignore[arg-type]  # it has the four lengths
