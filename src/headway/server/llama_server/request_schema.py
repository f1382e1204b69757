"""The fields that requests to llama-server's routes for text have, and what they are here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from headway.base.rng import fresh_seed
from headway.base.text import short_repr
from headway.program.engine import Engine
from headway.server.api.checks import RequestChecks, as_number
from headway.server.api.penalty_window import counts_prompt, penalty_fields
from headway.server.api.request_schema import (
    OFF_VALUES,
    Count,
    FailAtFirst,
    NonNegative,
    RequestSchema,
    SamplingFields,
    Text,
    Texts,
    described,
)
from headway.server.errors import bad_request
from headway.server.llama_server.line_limits import LineLimits
from headway.server.llama_server.samplers import of_samplers
from headway.server.models import ModelLease
from headway.server.openai.completions import CompletionExtras

SHARED = tuple(name for name in SamplingFields.model_fields if name not in ("seed", "logit_bias", "repeat_penalty"))
ANY_SEED = (-1, 0xFFFFFFFF)
ALIASES = {"max_tokens": "n_predict", "max_completion_tokens": "n_predict", "n": "n_cmpl", "logprobs": "n_probs"}
LONGEST_MS = 10**12  # a time limit beyond it is none
_VALUE = {"anyOf": [{"type": "number"}, {"const": False}]}
BIAS: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "additionalProperties": _VALUE},
        {"type": "array", "items": {"type": "array", "prefixItems": [{"type": ["integer", "string"]}, _VALUE]}},
    ]
}


class ScaledAdapter(RequestSchema):
    """An adapter of `GET /lora-adapters`, and how much of it."""

    id: NonNegative
    scale: float


class NativeFields(SamplingFields):
    """The fields of both routes. What a request does not set is the model's own, not llama-server's."""

    off_values: ClassVar[dict[str, Any]] = {
        **{name: off for name, off in OFF_VALUES.items() if name not in ("n_probs", "timings_per_token", "lora")},
        "adaptive_decay": 0.9,
        "adaptive_target": -1,
        "backend_sampling": False,
        "dynatemp_exponent": 1,
        "dynatemp_range": 0,
        "echo": False,
        "grammar_lazy": False,
        "grammar_triggers": [],
        "min_keep": 0,
        "n_cache_reuse": 0,
        "penalty_prompt": False,
        "preserved_tokens": [],
        "sse_ping_interval": -1,
        "top_n_sigma": -1,
        "verbose": False,
    }

    model: str | None = None
    n_predict: Annotated[int, described(minimum=-1)] | None = None
    max_tokens: Annotated[int, described(minimum=-1)] | None = None
    max_completion_tokens: Annotated[int, described(minimum=-1)] | None = None
    n_cmpl: Count | None = None
    n: Count | None = None
    n_probs: NonNegative | None = None
    logprobs: NonNegative | None = None
    post_sampling_probs: bool | None = None
    stop: Text | Texts | Annotated[list[str], described(maxItems=0)] | None = None
    grammar: str | None = None
    stream: bool | None = None
    samplers: Annotated[list[str], FailAtFirst()] | None = None
    repeat_last_n: Annotated[int, described(minimum=-1)] | None = None
    logit_bias: Annotated[Any, described(**BIAS)] = None  # read in `_bias`
    lora: Annotated[list[ScaledAdapter], FailAtFirst()] | None = None
    n_indent: NonNegative | None = None
    t_max_predict_ms: Annotated[int, described(minimum=-1)] | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[str], FailAtFirst()] | None = None
    cache_prompt: bool | None = None  # false: nothing is taken from the prefix cache

    id_slot: int | None = None  # requests do not choose where they are computed; ignored
    n_keep: Annotated[int, described(minimum=-1)] | None = None  # a context is not shifted; ignored
    n_discard: NonNegative | None = None  # the same
    t_max_prompt_ms: int | None = None  # llama-server does not read it either; ignored


def unaliased(body: NativeFields, *names: str) -> dict[str, Any]:
    """The values of fields that have other names too: from the name that is set."""
    found: dict[str, Any] = {}
    for name in names:
        given = {one: getattr(body, one) for one in (name, *ALIASES) if one == name or ALIASES[one] == name}
        given = {one: value for one, value in given.items() if value is not None}
        if len(set(given.values())) > 1:
            first, second = list(given)[:2]
            values = f"{first} is {given[first]!r:.60} and {second} is {given[second]!r:.60}"
            raise bad_request(f"{values}; pass one of them", second)
        found[name] = next(iter(given.values()), None)
    return found


def check_aliases(body: NativeFields) -> None:
    """Raise where a field and another name of it say different things."""
    unaliased(body, *ALIASES.values())


def native_limit(body: NativeFields, longest: int, check: RequestChecks, field: str) -> int:
    """How many tokens may be generated after a prompt of so many."""
    given = unaliased(body, "n_predict")["n_predict"]
    if given is not None and given < -1:
        raise bad_request(
            f"n_predict is {given!r:.60}; it must be -1 (no limit) or at least 0", "n_predict", "out_of_range"
        )
    limit = check.max_new_tokens(longest, None if given == -1 else given, body.min_tokens or 0, field)
    return 0 if given == 0 else limit


def native_extras(body: NativeFields, lease: ModelLease, limits: tuple[int, ...] = ()) -> CompletionExtras:
    """What the request asks of a completion beyond OpenAI's fields. `limits` are those of its prompts, if they
    differ."""
    for name in ("n_indent", "n_discard"):
        _check_low(name, getattr(body, name), 0)
    for name in ("t_max_predict_ms", "n_keep"):
        _check_low(name, getattr(body, name), -1)
    seconds, indent = min(body.t_max_predict_ms or 0, LONGEST_MS) / 1000, body.n_indent or 0
    return CompletionExtras(
        cut=(lambda: LineLimits(max(0.0, seconds), indent)) if seconds > 0 or indent > 0 else None,
        warms=True,
        penalize_prompt=counts_prompt(body.repeat_last_n),
        limits=limits,
        adapters=None if body.lora is None else _adapters(body.lora, lease),
    )


def _check_low(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise bad_request(f"{name} is {value!r:.60}; it must be an integer of at least {low}", name, "out_of_range")


def _adapters(given: list[ScaledAdapter], lease: ModelLease) -> tuple[Any, ...]:
    """The adapters of a request, by their numbers in `GET /lora-adapters`."""
    if lease.adapter is not None:
        raise bad_request(f"the model {lease.name!r} is an adapter itself; name its model, or remove lora", "lora")
    known, mixed = tuple(lease.model.adapters.names.values()), {}
    for i, one in enumerate(given):
        if not 0 <= one.id < len(known):
            raise bad_request(
                f"lora[{i}].id is {one.id!r:.60}; GET /lora-adapters lists the {len(known)} adapters of this model",
                "lora",
            )
        if one.id in mixed:
            raise bad_request(f"lora has the id {one.id!r:.60} twice; pass one scale for each", "lora")
        mixed[one.id] = (known[one.id].adapter, one.scale)
    return tuple(pair for pair in mixed.values() if pair[1])


def sampling_fields(body: NativeFields, check: RequestChecks) -> dict[str, Any]:
    """What the request sets, by the names that completions have."""
    engine = check.engine
    fields: dict[str, Any] = {name: getattr(body, name) for name in (*SHARED, "stop", "grammar", "stream")}
    if body.repeat_penalty is not None:
        if body.repetition_penalty not in (None, body.repeat_penalty):
            raise bad_request("repetition_penalty and repeat_penalty differ; pass one of them", "repeat_penalty")
        fields["repetition_penalty"] = body.repeat_penalty
    fields = {name: value for name, value in fields.items() if value is not None}
    fields |= penalty_fields(body.repeat_last_n, fields, engine, "repeat_last_n")
    if body.samplers is not None:
        fields = of_samplers(body.samplers, fields, engine.generation_defaults)
    if body.seed is not None and body.seed not in ANY_SEED:
        fields["seed"] = body.seed
    if body.cache_prompt is False:
        fields["cache_salt"] = f"{body.cache_salt or ''}\0{fresh_seed()}"
    own = unaliased(body, "n_probs", "n_cmpl")
    fields |= {"logprobs": own["n_probs"] or None, "n": own["n_cmpl"]}
    if body.post_sampling_probs:
        fields["logprobs_mode"] = "processed"
    bias, banned = _bias(body.logit_bias, engine)
    fields |= {"logit_bias": bias or None, "bad_words": [*(body.bad_words or ()), *banned] or None}
    return {name: value for name, value in fields.items() if value is not None}


def _bias(given: Any, engine: Engine) -> tuple[dict[str, float], list[list[int]]]:
    """`logit_bias` as values by token, and the tokens that are forbidden (`false`).

    It is an object, or a list of pairs, of a token (an id, or a text whose tokens are meant) and a value. Values of a
    token add up.
    """
    bias: dict[str, float] = {}
    banned: list[list[int]] = []
    pairs = [[_key(name), value] for name, value in given.items()] if isinstance(given, dict) else given
    for i, pair in enumerate(pairs if isinstance(pairs, list) else [] if given is None else [given]):
        token, value = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        number = as_number(value)
        if isinstance(token, bool) or not isinstance(token, int | str) or (number is None and value is not False):
            raise bad_request(
                f"logit_bias[{i}] is {short_repr(pair)}; it must be a token (an id or a text) and a number, or false",
                "logit_bias",
                "invalid_value",
            )
        ids = [token] if isinstance(token, int) else engine.tokenizer.encode(token)
        if number is None:
            banned += [[id] for id in ids]
            continue
        for id in ids:
            bias[str(id)] = bias.get(str(id), 0.0) + number
    return bias, banned


def _key(name: str) -> int | str:
    """A key of an object: an id where it is a number."""
    return int(name) if name.isascii() and name.isdecimal() and len(name) <= 18 else name
