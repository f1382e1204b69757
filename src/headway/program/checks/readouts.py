"""Checks of samplers and probes against a model's size. Each raises with the value, the limit and a hint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from headway.base.checks import check_list
from headway.base.errors import InvalidInput, OutOfRange, Unsupported, WrongType
from headway.base.specs.logits_rules import SWITCHES
from headway.base.specs.probes import (
    AttentionScores,
    Distribution,
    Hidden,
    LogitLens,
    Logprob,
    Logprobs,
    Probe,
    Ranking,
)
from headway.base.specs.samplers import Sampler, Sampling, bias_array, resolve
from headway.base.text import short_repr
from headway.program.checks.ids import integers, token_ids


class ModelSize(Protocol):
    """What of a model's config the checks need."""

    @property
    def layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def attention_layers(self) -> tuple[int, ...]: ...


class SampleAsk(NamedTuple):
    """What a program asks for with `sample`, checked: the rows, the sampler, and the tokens that penalties count."""

    rows: list[int]
    what: Sampling
    history: tuple[int, ...] | None
    generated: tuple[int, ...] | None


def checked_sample(
    config: ModelSize,
    indices: Iterable[int],
    sampler: Sampler,
    history: Iterable[int] | None,
    generated: Iterable[int] | None,
) -> SampleAsk:
    """The arguments of `Forward.sample`; raises for what no context could take."""
    rows = integers(indices, "indices")
    if not rows:
        raise InvalidInput("sample was given no rows; -1 is the last")
    if not isinstance(sampler, Sampler):
        raise WrongType(
            f"{short_repr(sampler)} is not a sampler; give Argmax(), Multinomial(...), Sampling(...) or another one"
        )
    what, vocab = resolve(sampler), config.vocab_size
    check_readout(config, what)
    past = None if history is None else tuple(token_ids(history, vocab, "history"))
    new = None if generated is None else tuple(token_ids(generated, vocab, "generated"))
    return SampleAsk(rows, what, past, new)


def check_one_draw(how: Sampling) -> None:
    """Raise for rules of a generation, where a sampler draws at one row."""
    if how.has_rules:
        name = next(name for name in SWITCHES.values() if getattr(how, name))
        raise Unsupported(
            f"{name} is {getattr(how, name):g}, and DRY, XTC and mirostat are rules of a generation, which a draw "
            "at one row does not follow; give the sampler to ctx.generate or ctx.chat"
        )


def check_readout(config: ModelSize, what: Sampling | Probe) -> None:
    """Raise unless this model has the tokens and layers that a sampler or probe names."""
    layers, vocab = config.layers, config.vocab_size
    match what:
        case Sampling():
            check_one_draw(what)
            token_ids([token for token, _ in what.bias], vocab, "logit_bias ids")
            if what.dense_bias is not None:
                bias_array(what.dense_bias, "logit_bias", vocab)
        case Hidden(layer) if layer > layers:
            raise OutOfRange(f"Hidden({layer}): this model has hidden states 0 to {layers}")
        case AttentionScores(layer) if layer >= layers:
            raise OutOfRange(f"AttentionScores({layer}): this model has layers 0 to {layers - 1}")
        case AttentionScores(layer) if layer not in config.attention_layers:
            has = (
                f"layers {', '.join(map(str, config.attention_layers))} have" if config.attention_layers else "none has"
            )
            raise Unsupported(f"AttentionScores({layer}): layer {layer} is recurrent and has no attention; {has} it")
        case LogitLens(layers=wanted) if any(l > layers for l in wanted):
            raise OutOfRange(f"LogitLens({list(wanted)}): this model has hidden states 0 to {layers}")
        case Distribution(k=k) | LogitLens(k=k) if k > vocab:
            raise InvalidInput(f"k is {k}; this model has {vocab} tokens, and k=0 reads them all")
        case Ranking(k=k) if k > vocab:
            raise InvalidInput(f"k is {k}; this model has {vocab} tokens")
        case Ranking(ids=ids):
            token_ids(ids, vocab, "Ranking ids")
        case Logprob(id=token):
            token_ids([token], vocab, "Logprob id")
        case Logprobs(ids=ids):
            token_ids(ids, vocab, "Logprobs ids")


def check_probe(config: ModelSize, probe: object, name: str = "") -> None:
    """Raise unless this is a probe that the model can read."""
    if not isinstance(probe, Probe):
        raise WrongType(
            f"{name}{short_repr(probe)} is not a probe; give Logits(), Distribution(...), Entropy() or another one"
        )
    check_readout(config, probe)


def checked_probes(config: ModelSize, probe: object) -> Probe | tuple[Probe, ...] | None:
    """What `probe=` of a call gives; raises where one is not a probe, or not one of this model."""
    if probe is None:
        return None
    if isinstance(probe, Probe):
        check_probe(config, probe)
        return probe
    several = tuple(check_list(probe, "probe", "a probe, such as Entropy(), or a list of them"))
    for number, one in enumerate(several):
        check_probe(config, one, f"probe[{number}]: ")
    return several
