"""The prompts of `/completion`: one, or several in a list.

A text, a list of token ids and a list of ids and texts are one prompt; a list without ids at its top is several.
"""

from __future__ import annotations

from typing import Any

from headway.base.text import short_repr
from headway.server.api.checks import RequestChecks, unknown_token
from headway.server.api.prompts import encode
from headway.server.errors import ApiError, bad_request

FORMS = 'a text, {"prompt_string": a text}, a list of token ids and texts, or a list of these'
_TEXT, _OBJECT = {"type": "string"}, {"type": "object"}
_MIXED = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "minItems": 1}
SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, _OBJECT, _MIXED, {"type": "array", "items": {"anyOf": [_TEXT, _OBJECT, _MIXED]}, "minItems": 1}]
}


def read_native_prompts(given: Any, check: RequestChecks) -> list[list[int]]:
    """The token ids of each prompt. With a BOS token in front, if the model uses one and a prompt begins with a text.
    In a thread."""
    if not isinstance(given, list) or any(map(_is_id, given)):
        return [_read(given, "prompt", check)]
    if not given:
        raise bad_request(f"prompt is empty; pass {FORMS}", "prompt")
    check.size("prompt", len(given), check.settings.max_prompts)
    return [_read(one, f"prompt[{i}]", check) for i, one in enumerate(given)]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(given: Any, where: str, check: RequestChecks) -> list[int]:
    if isinstance(given, dict):
        given = _text_of(given, where)
    listed = given if isinstance(given, list) else [given]
    if not listed:
        raise bad_request(f"{where} is empty; pass {FORMS}", "prompt")
    check.text((one for one in listed if isinstance(one, str)), "prompt")
    ids: list[int] = []
    for i, one in enumerate(listed):
        place = f"{where}[{i}]" if isinstance(given, list) else where
        if isinstance(one, str):
            ids += encode(one, check.engine, begin=not i, special=True)
        elif not _is_id(one):
            raise _wrong(place, one)
        elif not 0 <= one < check.engine.vocab_size:
            raise unknown_token(place, one, check.engine.vocab_size, "prompt")
        else:
            ids.append(one)
    return ids


def _text_of(given: dict[str, Any], where: str) -> str:
    """The text of a prompt that is an object."""
    if given.get("multimodal_data"):
        raise bad_request(f"{where} has multimodal_data; the models here take text: remove it", "prompt", "unsupported")
    text = given.get("prompt_string")
    if not isinstance(text, str) or not set(given) <= {"prompt_string", "multimodal_data"}:
        raise _wrong(where, given)
    return text


def _wrong(where: str, value: Any) -> ApiError:
    return bad_request(f"{where} is {short_repr(value)}; the prompt must be {FORMS}", "prompt", "invalid_value")
