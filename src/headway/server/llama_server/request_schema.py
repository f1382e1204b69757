"""The fields that requests to llama-server's routes for text have, and what they are here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from headway.base.text import short_repr
from headway.program.engine import Engine
from headway.server.api.checks import RequestChecks, as_number
from headway.server.api.request_schema import OFF_VALUES, SamplingFields, Text, Texts, described
from headway.server.errors import bad_request

SHARED = tuple(name for name in SamplingFields.model_fields if name not in ("seed", "logit_bias"))
SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
BIAS: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "additionalProperties": {"type": "number"}, "propertyNames": {"pattern": "^[0-9]{1,18}$"}},
        {"type": "array", "items": {"type": "array", "prefixItems": [{"type": "integer"}, {}], "minItems": 2}},
    ]
}


class NativeFields(SamplingFields):
    """The fields of both routes. What a request does not set is the model's own, not llama-server's."""

    off_values: ClassVar[dict[str, Any]] = OFF_VALUES | {
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "min_keep": 0,
        "n_discard": 0,
        "n_indent": 0,
        "n_keep": 0,
        "penalty_prompt": False,
        "post_sampling_probs": False,
        "response_fields": [],
        "samplers": SAMPLERS,
        "t_max_predict_ms": 0,
        "t_max_prompt_ms": 0,
        "top_n_sigma": -1,
    }

    model: str | None = None
    n_predict: Annotated[int, described(minimum=-1)] | None = None
    stop: Text | Texts | Annotated[list[str], described(maxItems=0)] | None = None
    grammar: str | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    repeat_last_n: Annotated[int, described(minimum=-1)] | None = None
    logit_bias: Annotated[Any, described(**BIAS)] = None  # read in `_bias`
    cache_prompt: bool | None = None  # the prefix cache is always used; ignored
    id_slot: int | None = None  # requests do not choose where they are computed; ignored


def native_limit(body: NativeFields, prompt: int, check: RequestChecks, field: str) -> int:
    """How many tokens may be generated after a prompt of so many."""
    if body.n_predict == 0 or (body.n_predict or 0) < -1:
        raise bad_request(f"n_predict is {body.n_predict}; it must be -1 (no limit) or at least 1", "n_predict")
    given = body.n_predict if body.n_predict is not None and body.n_predict > 0 else None
    return check.max_new_tokens(prompt, given, body.min_tokens or 0, field)


def sampling_fields(body: NativeFields, engine: Engine) -> dict[str, Any]:
    """What the request sets, by the names that completions have."""
    _check_last(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in (*SHARED, "stop", "grammar", "stream")}
    fields["seed"] = None if body.seed == -1 else body.seed  # any, as llama-server has it
    bias, banned = _bias(body.logit_bias, engine)
    fields |= {"logit_bias": bias or None, "bad_words": [*(body.bad_words or ()), *banned] or None}
    return {name: value for name, value in fields.items() if value is not None}


def _check_last(body: NativeFields) -> None:
    """Raise if penalties are to look at some of the tokens only; they look at all."""
    penalizes = any((body.presence_penalty, body.frequency_penalty)) or (body.repeat_penalty or 1) != 1
    if penalizes and body.repeat_last_n is not None and body.repeat_last_n != -1:
        raise bad_request(
            f"repeat_last_n is {body.repeat_last_n}; penalties look at all tokens here: pass -1, or no penalty",
            "repeat_last_n",
            "unsupported",
        )


def _bias(given: Any, engine: Engine) -> tuple[dict[str, float], list[list[int]]]:
    """`logit_bias` as values by token, and the tokens that are forbidden (`false`).

    It is an object, or a list of pairs of a token (an id, or a text whose tokens are meant) and a value.
    """
    if given is None or isinstance(given, dict):
        return given or {}, []
    bias: dict[str, float] = {}
    banned: list[list[int]] = []
    for i, pair in enumerate(given if isinstance(given, list) else [given]):
        token, value = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        number = as_number(value)
        if isinstance(token, bool) or not isinstance(token, int | str) or (number is None and value is not False):
            raise bad_request(
                f"logit_bias[{i}] is {short_repr(pair)}; it must be a list of a token and a number, or false",
                "logit_bias",
                "invalid_value",
            )
        ids = [token] if isinstance(token, int) else engine.tokenizer.encode(token)
        if number is None:
            banned += [[id] for id in ids]
        else:
            bias |= {str(id): number for id in ids}
    return bias, banned
