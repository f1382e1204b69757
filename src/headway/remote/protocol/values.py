"""The values that programs give and get, as JSON and back: samplers, probes, masks, grammars, results, errors.

Decoding makes them through their own constructors, which check them: a value that came over the network is as good as
one that a program in this process has made. A `Mask.rule` travels as the rows that its function gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from headway.base import errors
from headway.base.errors import HeadwayError, InvalidMask, WrongType
from headway.base.specs import probes, samplers
from headway.base.specs.brle import Brle
from headway.base.specs.mask_rules import (
    READ_BOOL,
    READ_RUNS,
    All,
    Blocks,
    Causal,
    Either,
    Function,
    Not,
    Raw,
    Rule,
    SinkWindow,
    Window,
    complement,
)
from headway.base.specs.masks import Mask
from headway.base.specs.probes import Distribution, Entropy, LogitLens, Probe, Rank, Ranked, Ranking
from headway.base.specs.samplers import Sampler, Sampling
from headway.program.constraints.grammar import Grammar
from headway.remote.protocol.codec import BadMessage, as_number, number
from headway.runtime.passes import PassStats

SAMPLERS = {
    kind.__name__: kind
    for kind in (
        samplers.Argmax,
        samplers.Multinomial,
        samplers.TopK,
        samplers.TopP,
        samplers.MinP,
        samplers.TopKTopP,
        samplers.Typical,
        samplers.Sampling,
    )
}
PROBES = {
    kind.__name__: kind
    for kind in (
        probes.Logits,
        probes.Distribution,
        probes.Logprob,
        probes.Logprobs,
        probes.Entropy,
        probes.Ranking,
        probes.Hidden,
        probes.AttentionScores,
        probes.LogitLens,
    )
}
MASK_DEPTH = 64  # of rules inside each other
READS = {"runs": READ_RUNS, "booleans": READ_BOOL}

# --- samplers and probes


def spec_json(spec: Sampler | Probe) -> dict[str, Any]:
    """A sampler or a probe."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if isinstance(spec, Sampling):
        values["logit_bias"] = spec.dense_bias if spec.dense_bias is not None else [list(pair) for pair in spec.bias]
    return {"kind": type(spec).__name__, **values}


def sampler_of(given: Any) -> Sampler:
    """The sampler of its JSON."""
    return _spec(given, SAMPLERS, "sampler")


def probe_of(given: Any) -> Probe:
    """The probe of its JSON."""
    return _spec(given, PROBES, "probe")


def _spec(given: Any, kinds: Mapping[str, Any], what: str) -> Any:
    if not isinstance(given, dict) or not isinstance(given.get("kind"), str) or given["kind"] not in kinds:
        raise WrongType(f"{given!r:.80} is not a {what}; its kind must be one of {', '.join(kinds)}")
    values = {name: value for name, value in given.items() if name != "kind"}
    kind = kinds[given["kind"]]
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(values) - known):
        raise WrongType(f"the {what} {given['kind']} has no {unknown[0]!r:.80}; it has {', '.join(sorted(known))}")
    try:
        return kind(**values)
    except TypeError as error:
        if isinstance(error, HeadwayError):
            raise
        raise WrongType(f"the {what} {given['kind']}: {error}") from None


# --- attention masks


def mask_json(mask: Mask, rules: Mapping[int, Sequence[Any]] | None = None) -> list[Any]:
    """A mask; `rules` has the rows of each function in it, by its id."""
    return _rule_json(mask.tree, rules or {})


def _rule_json(rule: Rule, rules: Mapping[int, Sequence[Any]]) -> list[Any]:
    match rule:
        case Causal():
            return ["causal"]
        case Window(size):
            return ["window", size]
        case SinkWindow(sink, window):
            return ["sink", sink, window]
        case Blocks(lengths, sees):
            return ["blocks", list(lengths), [list(pair) for pair in sees]]
        case Function(fn):
            return ["rows", rules[id(fn)]]
        case Raw(rows, read, rectangular):
            read = next(name for name, text in READS.items() if text == read)
            return ["raw", [list(row.runs) for row in rows], read, rectangular]
        case Not(inner):
            return ["not", _rule_json(inner, rules)]
        case All(parts):
            return ["all", [_rule_json(part, rules) for part in parts]]
        case Either(parts):
            return ["either", [_rule_json(part, rules) for part in parts]]


def mask_of(given: Any) -> Mask:
    """The mask of its JSON."""
    return Mask(_rule_of(given, MASK_DEPTH))


def _rule_of(given: Any, depth: int) -> Rule:
    if depth == 0:
        raise InvalidMask(f"the attention mask has more than {MASK_DEPTH} rules inside each other")
    match given:
        case ["causal"]:
            return Causal()
        case ["window", size]:
            return Mask.window(size).tree
        case ["sink", sink, window]:
            return Mask.sink(sink, window).tree
        case ["blocks", lengths, sees]:
            return Mask.blocks(lengths, sees).tree
        case ["raw", [*rows], str(read), bool(rectangular)] if read in READS:
            kept = tuple(Brle.from_runs(row, where=f"row {i} of the attention mask") for i, row in enumerate(rows))
            return Raw(kept, READS[read], rectangular)
        case ["rows", [*rows]]:
            return Function(_RuleRows(rows))
        case ["not", inner]:
            return complement(_rule_of(inner, depth - 1))
        case ["all", [first, *more]]:
            return All(tuple(_rule_of(part, depth - 1) for part in (first, *more)))
        case ["either", [first, *more]]:
            return Either(tuple(_rule_of(part, depth - 1) for part in (first, *more)))
    raise WrongType(f"{given!r:.80} is not an attention mask; see docs/protocol.md")


class _RuleRows:
    """What the function of a `Mask.rule` gave on the client, by the row's position and the number of slots."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows: dict[tuple[int, int], Brle] = {}
        for row in rows:
            match row:
                case [int(position), [*runs]]:
                    bits = Brle.from_runs(runs, where=f"the rule's row at position {position}")
                    self._rows[position, len(bits)] = bits
                case _:
                    raise WrongType(f"{row!r:.80} is not a row of a rule: a position and runs")

    def __call__(self, row: int, slots: Any) -> Any:
        row_mask = self._rows.get((row, len(slots)))
        if row_mask is None:
            raise InvalidMask(
                f"the mask's rule was computed for other rows than the one at position {row} over {len(slots)} slots; "
                "over a connection a rule is computed ahead, for the positions that follow the context's last"
            )
        return row_mask.to_bool()


# --- grammars


def grammar_json(grammar: Grammar) -> list[Any]:
    """What a text must match."""
    return [grammar.kind, grammar.text, grammar.compact]


# --- results


def value_json(value: Any) -> Any:
    """What a probe has read."""
    match value:
        case Ranked():
            return [[[rank.id, number(rank.logprob), rank.rank] for rank in part] for part in _parts(value)]
        case float():
            return number(value)
        case list() | tuple():
            return [value_json(each) for each in value]
    return value if not hasattr(value, "ndim") or value.ndim else number(float(value))


def value_of(probe: Any, value: Any) -> Any:
    """What a probe has read, from its JSON."""
    match probe:
        case Entropy():
            return as_number(value)
        case Distribution():
            return tuple(value)
        case LogitLens():
            return [tuple(pair) for pair in value]
        case Ranking():
            return Ranked(*(tuple(Rank(id, as_number(logprob), rank) for id, logprob, rank in part) for part in value))
    return value


def probes_of(probe: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """`Step.probes` from its JSON; `probe` is one probe, or a tuple of them."""
    if isinstance(probe, tuple):
        return tuple(tuple(value_of(one, each) for one, each in zip(probe, row, strict=True)) for row in values)
    return tuple(value_of(probe, value) for value in values)


def _parts(ranked: Ranked) -> tuple[tuple[Rank, ...], ...]:
    return ranked.drawn, ranked.ids, ranked.best


def pass_stats_json(stats: PassStats) -> dict[str, Any]:
    """The figures of a pass."""
    return asdict(stats)


def pass_stats_of(given: dict[str, Any]) -> PassStats:
    """The figures of a pass, from their JSON."""
    return PassStats(**{**given, "seeds": tuple(given["seeds"])})


# --- errors


def error_json(error: HeadwayError) -> dict[str, str]:
    """An error: the name of its class and its message."""
    return {"kind": type(error).__name__, "message": str(error)}


def error_of(given: Any) -> HeadwayError:
    """The error of its JSON; one that this version does not know is a plain `HeadwayError`."""
    if not isinstance(given, dict) or not isinstance(given.get("message"), str):
        raise BadMessage(f"{given!r:.80} is not an error")
    kind = getattr(errors, str(given.get("kind")), None)
    known = isinstance(kind, type) and issubclass(kind, HeadwayError)
    return kind(given["message"]) if known else HeadwayError(given["message"])  # type: ignore[return-value]
