"""The parameters of one call of `ctx.generate`, settled: every value is known and none contradicts another.

For each parameter the first of these that has a value decides:

    an argument of the call  >  the call's sampler  >  generation_config.json  >  the default

A sampler says all about how to draw, so with one the whole file is ignored: `ctx.generate(Argmax())` takes the
likeliest token whatever a model's publisher recommends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported
from headway.base.specs.adapters import AdapterMix
from headway.base.specs.generation import PARAMETERS, WITHOUT_BEAMS, parameters_of
from headway.base.specs.logits_rules import NAMES as RULES
from headway.base.specs.logits_rules import LogitsRuleValues
from headway.base.specs.masks import Mask
from headway.base.specs.probes import Ranking
from headway.base.specs.samplers import Sampler, Sampling, resolve
from headway.base.text import short_repr
from headway.program.adapters import AdapterArgument, mix_of
from headway.program.checks.readouts import checked_probes
from headway.program.constraints.constraint import Constraint, check_constraint
from headway.program.constraints.grammar import Grammar
from headway.program.generation.defaults import FILE, SAMPLED, GenerationDefaults
from headway.program.generation.draws import Probes
from headway.program.generation.hooks import LogitsHook, PrepareHook
from headway.program.generation.speculation.drafter import Drafter, check_drafter
from headway.program.generation.stops import listed_stops
from headway.program.generation.word_bias import WordBias

if TYPE_CHECKING:
    from headway.program.context import Context

MAX_TOKENS = PARAMETERS["max_tokens"].default
NO_FILE = GenerationDefaults()
BY_FILE = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "no_repeat_ngram_size")
IN_FILES = parameters_of("file")
BY_CALL = ("constrain", "attention_mask", "speculate", "verify", "prepare", "logits")  # taken as they are given


class Options(TypedDict, total=False):
    """The types of `ctx.generate`'s arguments that change nothing about the type of its result."""

    max_tokens: int | None
    max_length: int | None
    min_tokens: int | None
    min_length: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Iterable[str] | None
    xtc_probability: float | None
    xtc_threshold: float | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    no_repeat_ngram_size: int | None
    bad_words_ids: Iterable[Iterable[int]] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Iterable[tuple[Iterable[int], float]] | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    stop: str | Iterable[str | int]
    stop_only: bool
    constrain: Grammar | Constraint | None
    attention_mask: Mask | None
    penalize_prompt: bool
    prepare: PrepareHook | None
    logits: LogitsHook | None
    adapter: AdapterArgument | None
    speculate: Drafter | None
    verify: Literal["match", "rejection"]


class OneSequence(Options, total=False):
    """A call whose result is a `Generation`."""

    num_beams: None
    num_return_sequences: None


class Several(Options, total=False):
    """A call whose result is `Generations`: of a beam search, or of several draws."""

    num_beams: int | None
    num_return_sequences: int | None


@dataclass(frozen=True, eq=False)
class Parameters:
    """How one call generates."""

    sampler: Sampling
    max_tokens: int
    min_tokens: int
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    no_repeat_ngram_size: int
    words: WordBias | None
    stop: tuple[str | int, ...]
    stop_only: bool
    constrain: Grammar | Constraint | None
    probe: Probes
    attention_mask: Mask | None
    penalize_prompt: bool
    speculate: Drafter | None
    verify: Literal["match", "rejection"] = "match"
    prepare: PrepareHook | None = None
    logits: LogitsHook | None = None
    rules: LogitsRuleValues | None = None
    adapter: AdapterMix | None = None

    @property
    def draws(self) -> bool:
        return self.sampler.temperature > 0


def settle(context: Context, sampler: Sampler | None, options: Mapping[str, Any]) -> Parameters:
    """The parameters of `context.generate(sampler, **options)`; `options` has every parameter of the call by name.

    End tokens that the model's file names, besides its tokenizer's, become stops.
    """
    engine, prompt = context.engine, len(context.tokens)
    own = None if sampler is None else resolve(sampler)
    stop_only, penalize_prompt = (PARAMETERS[name].check(options[name]) for name in ("stop_only", "penalize_prompt"))
    adapter, probe = mix_of(engine, options["adapter"]), checked_probes(engine.config, options["probe"])
    given = _given(options)
    check_constraint(options["constrain"])
    check_drafter(options["speculate"], options["verify"])
    _check_pair("max_tokens", given.max_new_tokens, "max_length", given.max_length)
    _check_pair("min_tokens", given.min_new_tokens, "min_length", given.min_length)
    base = engine.generation_defaults if own is None else NO_FILE
    chosen = given if base is NO_FILE else _override(base, given)
    limit = chosen.max_tokens(prompt)
    if limit is None:
        limit = MAX_TOKENS if chosen.value("num_beams") == 1 else min(MAX_TOKENS, max(context._room(), 1))
    ends = () if stop_only else sorted(set(base.eos_ids or ()).difference(engine.eos_ids))
    settled = Parameters(
        sampler=_file_sampler(chosen, given) if own is None else _given_sampler(own.without_rules(), given),
        max_tokens=limit,
        min_tokens=chosen.min_tokens(prompt),
        words=WordBias.of(chosen.bad_words_ids, chosen.sequence_bias, engine.vocab_size),
        stop=(*listed_stops(options["stop"]), *ends),
        stop_only=stop_only,
        probe=probe,
        penalize_prompt=penalize_prompt,
        adapter=adapter,
        **{name: chosen.value(name) for name in BY_FILE},
        **{name: options[name] for name in BY_CALL},
    )
    rules = LogitsRuleValues.of({name: options[name] for name in RULES}, None if own is None else own.rules)
    settled = replace(settled, rules=_checked_rules(rules, settled))
    _check_lengths(settled, given)
    if settled.num_beams == 1:
        _check_without_beams(settled, given)
    else:
        _check_beams(settled)
    return settled


def _checked_rules(rules: LogitsRuleValues, settled: Parameters) -> LogitsRuleValues | None:
    """DRY, XTC and mirostat; None where all of them are off."""
    if rules.is_off:
        return None
    for name, is_given in (("speculate", settled.speculate is not None), ("num_beams", settled.num_beams > 1)):
        if is_given:
            raise Unsupported(f"{name} cannot be given with dry, xtc or mirostat; leave one of them out")
    return rules


def _given(options: Mapping[str, Any]) -> GenerationDefaults:
    """Those of a call's parameters that a model's file may have, too."""
    values: dict[str, Any] = {}
    for parameter in IN_FILES:
        value, name = options[parameter.name], parameter.name_on("file")
        if value is not None and name != parameter.name:  # an error has the name that the caller knows
            value = parameter.check(value)
        values[name] = value
    return GenerationDefaults(**values)


def _override(base: GenerationDefaults, given: GenerationDefaults) -> GenerationDefaults:
    """The base with the values given; a length that counts the prompt replaces one that does not."""
    if given.max_length is not None:
        base = replace(base, max_new_tokens=None)
    if given.min_length is not None:
        base = replace(base, min_new_tokens=None)
    return base.overridden(**given.given)


def _file_sampler(chosen: GenerationDefaults, given: GenerationDefaults) -> Sampling:
    """The sampler of a call without one."""
    if given.do_sample and given.temperature == 0:
        raise InvalidInput("do_sample=True and temperature=0 were both given; temperature 0 draws nothing: give one")
    return chosen.sampler(**{name: getattr(given, name) for name in SAMPLED})


def _given_sampler(sampler: Sampling, given: GenerationDefaults) -> Sampling:
    """The call's sampler, with the repetition penalty of the call."""
    for name in SAMPLED:
        if (value := getattr(given, name)) is not None:
            raise InvalidInput(
                f"{name}={short_repr(value)} was given with a sampler, which says how to draw; give it to that"
            )
    draws = sampler.temperature > 0
    if given.do_sample is not None and given.do_sample != draws:
        does = "draws" if draws else "takes the likeliest token"
        raise InvalidInput(
            f"do_sample={given.do_sample} was given with a sampler of temperature {sampler.temperature:g}, "
            f"which {does}; leave one of them out"
        )
    if given.repetition_penalty is None:
        return sampler
    return replace(sampler, repetition_penalty=given.repetition_penalty)


def _check_pair(one: str, a: int | None, other: str, b: int | None) -> None:
    if a is not None and b is not None:
        raise InvalidInput(
            f"{one}={a} and {other}={b} were both given; {one} counts new tokens and {other} the prompt too: give one"
        )


def _check_lengths(settled: Parameters, given: GenerationDefaults) -> None:
    low, high = settled.min_tokens, settled.max_tokens
    if low > high:
        from_file = given.min_new_tokens is None and given.min_length is None
        source = f" (by {FILE})" if from_file else ""
        raise InvalidInput(f"min_tokens is {low}{source} and max_tokens is {high}; it must not be larger")


def _check_without_beams(settled: Parameters, given: GenerationDefaults) -> None:
    for name, off in WITHOUT_BEAMS.items():
        if getattr(given, name) not in (None, off) and given.num_beams is None:
            raise InvalidInput(f"{name}={getattr(given, name)!r} has no effect with one beam; give num_beams too")
    if (count := settled.num_return_sequences) > 1 and not settled.draws:
        raise InvalidInput(
            f"num_return_sequences is {count} and nothing is drawn (temperature 0), so they would all be the same; "
            f"give do_sample=True, another sampler, or num_beams={count}"
        )


def _check_beams(settled: Parameters) -> None:
    """Raise for parameters that a beam search does not support."""
    beams, count, sampler = settled.num_beams, settled.num_return_sequences, settled.sampler
    if count > beams:
        raise InvalidInput(f"num_return_sequences is {count}; with num_beams={beams} it is at most {beams}")
    off: dict[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": ()}
    if settled.draws:
        off |= {"min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
    for name, value in off.items():
        if (own := getattr(sampler, name)) != value:
            raise Unsupported(
                f"{name}={short_repr(own)} is not supported with num_beams={beams}; leave one of them out"
            )
    refused = {
        "penalize_prompt=False": not settled.penalize_prompt,
        "speculate": settled.speculate is not None,
    }
    if settled.prepare is not None:
        raise Unsupported(
            f"prepare cannot be given with num_beams={beams}: a beam's pass draws nothing, so what a hook adds to its "
            "draw would be ignored; give logits, a hook on the log-probabilities after every beam"
        )
    for name, is_given in refused.items():
        if is_given:
            raise Unsupported(f"{name} cannot be given with num_beams={beams}; leave one of them out")
    probes = settled.probe if isinstance(settled.probe, tuple) else (settled.probe,)
    if any(isinstance(probe, Ranking) and probe.processed for probe in probes):
        raise Unsupported(
            f"Ranking(processed=True) ranks tokens as a sampler sees them, and with num_beams={beams} there is none; "
            "leave processed out"
        )
