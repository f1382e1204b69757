"""Checks of samplers and probes against a model's size. Each raises with the value, the limit and a hint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from headway.base.errors import InvalidInput, OutOfRange, WrongType
from headway.base.probes import AttentionScores, Distribution, Hidden, LogitLens, Logprob, Logprobs, Probe, Ranking
from headway.base.samplers import Sampler, Sampling, bias_array, resolve
from headway.base.text import short_repr
from headway.program.ids import integers, token_ids


class ModelSize(Protocol):
    """What of a model's config the checks need."""

    @property
    def layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


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


def check_readout(config: ModelSize, what: Sampling | Probe) -> None:
    """Raise unless this model has the tokens and layers that a sampler or probe names."""
    layers, vocab = config.layers, config.vocab_size
    match what:
        case Sampling():
            token_ids([token for token, _ in what.bias], vocab, "logit_bias ids")
            if what.dense_bias is not None:
                bias_array(what.dense_bias, "logit_bias", vocab)
        case Hidden(layer) if layer > layers:
            raise OutOfRange(f"Hidden({layer}): this model has hidden states 0 to {layers}")
        case AttentionScores(layer) if layer >= layers:
            raise OutOfRange(f"AttentionScores({layer}): this model has layers 0 to {layers - 1}")
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
