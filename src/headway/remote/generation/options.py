"""The arguments of `ctx.generate` as a server gets them; functions of the program's own stay here and get a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headway.base.errors import WrongType
from headway.base.specs.masks import Mask
from headway.base.specs.samplers import Sampler
from headway.base.text import short_repr
from headway.program.checks.readouts import checked_probes
from headway.program.constraints.grammar import Grammar
from headway.program.generation.speculation.drafter import copied_drafter
from headway.program.generation.stops import read_stops
from headway.remote.forward import adapter_list
from headway.remote.generation.ahead import Ahead
from headway.remote.generation.callables import check_callable
from headway.remote.generation.generator import RemoteGeneration
from headway.remote.generation.sequences import RemoteGenerations
from headway.remote.protocol.values import grammar_json, spec_json

if TYPE_CHECKING:
    from headway.remote.context import RemoteContext

LOOKUP = {"_most": "max_tokens", "_least_n": "min_ngram", "_most_n": "max_ngram", "_window": "window"}
OURS = {  # drafters that a server has too, and where they keep their arguments
    "PromptLookup": ("prompt_lookup", LOOKUP),
    "OwnLayers": ("own_layers", {"_layers": "layers", "_most": "max_tokens"}),
}


def generate(
    context: RemoteContext, sampler: Sampler | None, options: Mapping[str, Any]
) -> RemoteGeneration | RemoteGenerations:
    """The generation of these options."""
    engine, objects = context.engine, []
    number = engine._new_number()
    probe = checked_probes(engine.config, options.get("probe"))
    given = {name: value for name, value in options.items() if name not in _ENCODED and value is not None}
    given |= {name: _listed(given[name]) for name in ("bad_words_ids", "sequence_bias") if name in given}
    if sampler is not None:
        if not isinstance(sampler, Sampler):
            raise WrongType(f"{short_repr(sampler)} is not a sampler; use one of Argmax(), TopP(0.9), Sampling(...)")
        given["sampler"] = spec_json(sampler)
    if (mask := options.get("attention_mask")) is not None:
        if not isinstance(mask, Mask):
            raise WrongType(f"attention_mask is {short_repr(mask)}; a Mask is needed, such as Mask.window(64)")
        given["attention_mask"] = context._mask_json(mask, context._rule_rows(options) if mask.needs_positions else 0)
    if "stop" in options:
        strings, ids = read_stops(options["stop"], engine, only=True)
        given["stop"] = [*strings, *sorted(ids)]
    if probe is not None:
        given["probe"] = [spec_json(one) for one in probe] if isinstance(probe, tuple) else spec_json(probe)
    given["adapter"] = adapter_list(options.get("adapter"))
    constraint = options.get("constrain")
    given["constrain"] = _constraint(constraint, engine._callables.add, objects)
    given["speculate"] = _drafter(engine, options.get("speculate"), objects)
    for name in ("prepare", "logits"):
        if (hook := options.get(name)) is not None:
            check_callable(hook, name)
            given[name] = engine._callables.add(hook)
            objects.append(given[name])
    inbox = engine._open_inbox(number)
    try:
        reply = engine._connection.request(
            "generation.new",
            context=context._number,
            generation=number,
            options={name: value for name, value in given.items() if value is not None},
        )
    except BaseException:
        engine._close_inbox(number, objects)
        raise
    own = None if constraint is None or isinstance(constraint, Grammar) else constraint
    state = Ahead(engine._connection, number, inbox, patient=bool(objects))
    kind = RemoteGenerations if reply["several"] else RemoteGeneration
    return kind(context, state, reply["seed"], probe=probe, constraint=own, objects=objects)


_ENCODED = {"probe", "attention_mask", "stop", "adapter", "constrain", "speculate", "prepare", "logits"}


def _listed(given: Any) -> Any:
    """Token ids and biases as lists."""
    if isinstance(given, Mapping):
        return [[_listed(ids), bias] for ids, bias in given.items()]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return [_listed(each) for each in given]
    return getattr(given, "item", lambda: given)()


def _constraint(given: Any, add: Any, objects: list[int]) -> Any:
    if given is None:
        return None
    if isinstance(given, Grammar):
        return {"grammar": grammar_json(given)}
    lacks = [verb for verb in ("mask", "accept", "rollback") if not callable(getattr(given, verb, None))]
    if lacks or isinstance(given, type):
        raise WrongType(
            f"constrain is {short_repr(given)}, which is not a Grammar and has no {', '.join(lacks) or 'state'}; give "
            "Grammar.json_schema(...), .regex, .lark or .choices, or an object with mask(), accept() and rollback()"
        )
    objects.append(number := add(given))
    return {"object": number, "copy": hasattr(given, "copy"), "name": _class_name(given)}


def _drafter(engine: Any, given: Any, objects: list[int]) -> Any:
    if given is None:
        return None
    name, draws = type(given).__name__, hasattr(given, "draw_as")
    if type(given).__module__.startswith("headway.") and name in OURS:
        kind, fields = OURS[name]
        return {kind: {"adaptive": given.adaptive, **{own: getattr(given, at) for at, own in fields.items()}}}
    if isinstance(given, type) or not all(callable(getattr(given, verb, None)) for verb in ("draft", "accept")):
        raise WrongType(
            f"speculate is {short_repr(given)}; give PromptLookup(), OwnLayers(n), or an object with "
            "draft(tokens, limit) and accept(tokens)"
        )
    if copies := hasattr(given, "copy"):
        copied_drafter(given)  # raises if it cannot be
    if draws:  # it has an engine of its own
        from headway.program.generation.speculation.draft_model import check_same_tokens

        check_same_tokens(engine, given._model)
    objects.append(number := engine._callables.add(given))
    own = {"adaptive": bool(getattr(given, "adaptive", True)), "draws": draws}
    return {"object": number, "copy": copies, "name": _class_name(given), **own}


def _class_name(thing: Any) -> str:
    """How messages name an object of the program's own."""
    name = type(thing).__name__[:80]
    return name if name.isidentifier() else "Object"
