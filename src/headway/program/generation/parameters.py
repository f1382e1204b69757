"""What one call of `ctx.generate` asks for, settled: nothing is open and nothing contradicts.

For each parameter the first that says something decides:

    an argument of the call  >  the call's sampler  >  generation_config.json  >  the default

Who gives a sampler has said how to generate, so the file is put aside as a whole then: `ctx.generate(Argmax())` takes
the likeliest token whatever a model's publisher recommends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, Unsupported
from headway.base.masks import Mask
from headway.base.probes import Probe
from headway.base.samplers import Sampler, Sampling, resolve
from headway.program.constraints.constraint import Constraint
from headway.program.constraints.grammar import Grammar
from headway.program.generation.defaults import FILE, SAMPLED, GenerationDefaults

BEAMS = 1024  # at most
MAX_TOKENS = 256  # where nobody says anything


class Options(TypedDict, total=False):
    """What `ctx.generate` takes beside a sampler, `num_beams` and `num_return_sequences`, for its type."""

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
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    stop: str | Iterable[str | int]
    stop_only: bool
    constrain: Grammar | Constraint | None
    probe: Probe | None
    attention_mask: Mask | None
    adapter: object
    speculate: object
    penalize_prompt: bool


@dataclass(frozen=True)
class Parameters:
    """How one call generates."""

    sampler: Sampling
    max_tokens: int
    min_tokens: int
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = 0
    ends: tuple[int, ...] = ()  # end tokens that the file names

    @property
    def draws(self) -> bool:
        return self.sampler.temperature > 0


def settle(
    said: GenerationDefaults, sampler: Sampler | None, file: Callable[[], GenerationDefaults], prompt: int, room: int
) -> Parameters:
    """Parameters for a prompt of this length, with `room` tokens left: what the call said, and then the others."""
    _check_pair("max_tokens", said.max_new_tokens, "max_length", said.max_length)
    _check_pair("min_tokens", said.min_new_tokens, "min_length", said.min_length)
    base = file() if sampler is None else GenerationDefaults()
    chosen = _over(base, said)
    what = _drawing(chosen, said) if sampler is None else _turned(resolve(sampler), said)
    beams = check_integer(chosen.num_beams or 1, "num_beams", low=1, high=BEAMS)
    limit = chosen.max_tokens(prompt)
    if limit is None:
        limit = MAX_TOKENS if beams == 1 else min(MAX_TOKENS, max(room, 1))
    settled = Parameters(
        sampler=what,
        max_tokens=limit,
        min_tokens=chosen.min_tokens(prompt),
        num_beams=beams,
        num_return_sequences=chosen.num_return_sequences or 1,
        length_penalty=1.0 if chosen.length_penalty is None else chosen.length_penalty,
        early_stopping=chosen.early_stopping or False,
        no_repeat_ngram_size=chosen.no_repeat_ngram_size or 0,
        ends=base.eos_ids or (),
    )
    _check_lengths(settled, said)
    _check_several(settled, said)
    return settled


def _over(base: GenerationDefaults, said: GenerationDefaults) -> GenerationDefaults:
    """The base with what was said; a length that counts the prompt puts aside one that does not."""
    if said.max_length is not None:
        base = replace(base, max_new_tokens=None)
    if said.min_length is not None:
        base = replace(base, min_new_tokens=None)
    return base.overridden(**said.given)


def _drawing(chosen: GenerationDefaults, said: GenerationDefaults) -> Sampling:
    """The sampler of a call that gives none."""
    if said.do_sample and said.temperature == 0:
        raise InvalidInput("do_sample=True and temperature=0 were both given; temperature 0 draws nothing: give one")
    return chosen.sampler(**{name: getattr(said, name) for name in SAMPLED})


def _turned(sampler: Sampling, said: GenerationDefaults) -> Sampling:
    """A call's sampler under its other arguments."""
    for name in SAMPLED:
        if (value := getattr(said, name)) is not None:
            raise InvalidInput(f"{name}={value!r} was given beside a sampler, which says how to draw; give it to that")
    draws = sampler.temperature > 0
    if said.do_sample is not None and said.do_sample != draws:
        does = "draws" if draws else "takes the likeliest token"
        raise InvalidInput(
            f"do_sample={said.do_sample} was given with a sampler of temperature {sampler.temperature:g}, "
            f"which {does}; leave one of them out"
        )
    return sampler if said.repetition_penalty is None else replace(sampler, repetition_penalty=said.repetition_penalty)


def _check_pair(one: str, a: int | None, other: str, b: int | None) -> None:
    if a is not None and b is not None:
        raise InvalidInput(
            f"{one}={a} and {other}={b} were both given; {one} counts new tokens and {other} the prompt too: give one"
        )


def _check_lengths(settled: Parameters, said: GenerationDefaults) -> None:
    low, high = settled.min_tokens, settled.max_tokens
    if low > high:
        from_file = said.min_new_tokens is None and said.min_length is None
        source = f" (by {FILE})" if from_file else ""
        raise InvalidInput(f"min_tokens is {low}{source} and max_tokens is {high}; it must not be larger")


def _check_several(settled: Parameters, said: GenerationDefaults) -> None:
    """Raise where beams, or several sequences, do not go with the rest."""
    beams, count, what = settled.num_beams, settled.num_return_sequences, settled.sampler
    if beams == 1:
        for name in ("length_penalty", "early_stopping"):
            if getattr(said, name) is not None and said.num_beams is None:
                raise InvalidInput(f"{name}={getattr(said, name)!r} has no meaning with one beam; give num_beams too")
        if count > 1 and not settled.draws:
            raise InvalidInput(
                f"num_return_sequences is {count} and nothing is drawn (temperature 0), so they would all be the same; "
                f"give do_sample=True, another sampler, or num_beams={count}"
            )
        return
    if count > beams:
        raise InvalidInput(f"num_return_sequences is {count}; with num_beams={beams} it is at most {beams}")
    found: dict[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "bias": ()}
    if settled.draws:
        found |= {"min_p": 0.0, "typical_p": 1.0}
    for name, idle in found.items():
        if (value := getattr(what, name)) != idle:
            named = "logit_bias" if name == "bias" else name
            raise Unsupported(f"{named}={value!r:.60} is not supported with num_beams={beams}; leave one of them out")
