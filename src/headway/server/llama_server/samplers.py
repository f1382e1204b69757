"""`samplers`: which ones draw, and in which order, as llama-server's clients list them.

One that is not listed is off. The order here is fixed; another order is taken where it makes no difference, and
refused otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.base.text import short_repr
from headway.program.generation.defaults import GenerationDefaults
from headway.server.errors import bad_request

FIELDS: Mapping[str, Mapping[str, Any]] = {  # by sampler, in the order here: its parameters, and what turns them off
    "dry": {"dry_multiplier": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "typ_p": {"typical_p": 1.0},
}
ORDER = tuple(FIELDS)
DEPENDENT = {"dry": ("dry_",), "xtc": ("xtc_",)}  # parameters that mean nothing without the first
SAME = ({"temperature", "top_k"}, {"top_k", "min_p"})  # pairs whose order makes no difference
ABSENT = ("top_n_sigma",)  # may be listed: it is off, since no other value of its field is accepted


def of_samplers(given: list[str], fields: Mapping[str, Any], defaults: GenerationDefaults) -> dict[str, Any]:
    """The fields of a request that lists its samplers: without those of others, which are turned off."""
    for name in given:
        if name not in FIELDS and name not in ABSENT:
            raise _refused(f"samplers has {short_repr(name)}; there are {', '.join(ORDER)}")
        if given.count(name) > 1:
            raise _refused(f"samplers has {name!r} twice; each is applied once here")
    result = dict(fields)
    if result.get("top_k") == -1:  # off, as other servers write it
        result["top_k"] = 0
    for name in ORDER:
        if name not in given:
            for field in [one for one in fields if one.startswith(DEPENDENT.get(name, ()))]:
                del result[field]
            result |= {field: off for field, off in FIELDS[name].items() if name not in DEPENDENT}
    active = [name for name in given if name in FIELDS and _is_on(name, result, defaults)]
    if result.get("temperature") == 0:  # the likeliest token, whatever comes before
        return result
    for i, first in enumerate(active):
        for second in active[i + 1 :]:
            if ORDER.index(first) > ORDER.index(second) and {first, second} not in SAME:
                raise _refused(
                    f"samplers has {first} before {second}, which come in this order here: {', '.join(ORDER)}; "
                    "list them so, turn one off, or remove samplers"
                )
    return result


def _is_on(name: str, fields: Mapping[str, Any], defaults: GenerationDefaults) -> bool:
    """Whether a sampler does anything, by the request's fields or else the model's file."""

    def value(field: str) -> Any:
        given = fields.get(field)
        return getattr(defaults, field, None) if given is None else given

    return any(value(field) not in (None, off) for field, off in FIELDS[name].items())


def _refused(message: str) -> Exception:
    return bad_request(message, "samplers", "unsupported")
