"""The fields of a request with a recording: a multipart form, checked into a `SpeechForm`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.text import short_repr
from headway.server.api.form import FormPart, parse_form
from headway.server.audio.output import FORMATS, TIMED
from headway.server.errors import ApiError, bad_request
from headway.server.settings import ServerSettings

UNITS = ("segment", "word")
LANGUAGE = re.compile(r"[A-Za-z][A-Za-z -]{1,31}")
UNSUPPORTED = {
    "include": "there are no log-probabilities of transcripts: remove it",
    "include[]": "there are no log-probabilities of transcripts: remove it",
    "chunking_strategy": "long recordings are split where segments end: remove it",
    "known_speaker_names[]": "speakers are not told apart: remove it",
    "known_speaker_references[]": "speakers are not told apart: remove it",
}


@dataclass(frozen=True)
class SpeechForm:
    """A request that passed the checks that need no model."""

    file: bytes
    model: str | None
    format: str
    units: tuple[str, ...]  # of the times in verbose_json
    stream: bool
    language: str | None
    prompt: str | None
    temperature: float | None


def form_schema(*, translates: bool) -> dict[str, Any]:
    """The form in the OpenAPI document."""
    properties: dict[str, Any] = {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"type": "string", "enum": list(FORMATS)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    }
    if not translates:
        properties |= {
            "language": {"type": "string"},
            "stream": {"type": "string", "enum": ["true", "false"]},
            "timestamp_granularities[]": {"type": "array", "items": {"type": "string", "enum": list(UNITS)}},
        }
    content = {"multipart/form-data": {"schema": {"type": "object", "required": ["file"], "properties": properties}}}
    return {"requestBody": {"required": True, "content": content}}


def read_form(content_type: str, body: bytes, settings: ServerSettings, *, translates: bool) -> SpeechForm:
    """The form of a request; raises an `ApiError` that names the field."""
    lists = () if translates else ("timestamp_granularities[]",)
    parts = parse_form(content_type, body, lists=lists)
    known = {"file", "model", "prompt", "response_format", "temperature"}
    known |= set() if translates else {"language", "stream", "timestamp_granularities[]"}
    for name in parts:
        if name not in known:
            hint = UNSUPPORTED.get(name, "remove it")
            raise bad_request(
                f"the field {short_repr(name)} is unknown or not supported; {hint}", name[:80], "unknown_field"
            )
    if "file" not in parts:
        raise bad_request("the field 'file' is required", "file", "missing_field")
    file = parts["file"][0]
    if not file.value:
        raise bad_request("the file is empty; send a recording", "file", "invalid_audio")
    text = _Texts(parts)
    format = text.choice("response_format", FORMATS) or "json"
    units = tuple(dict.fromkeys(text.choices("timestamp_granularities[]", UNITS)))
    stream = text.choice("stream", ("true", "false", "True", "False")) in ("true", "True")
    if units and format != "verbose_json":
        raise bad_request(
            "timestamp_granularities requires response_format verbose_json; set it", "timestamp_granularities"
        )
    if stream and format not in ("json", "text"):
        raise bad_request(f"a stream has no {format}; use response_format json or text", "stream")
    prompt = text.one("prompt")
    if prompt is not None and len(prompt) > settings.max_stop_length:
        raise bad_request(
            f"prompt has {len(prompt)} characters; at most {settings.max_stop_length} are allowed", "prompt", "too_long"
        )
    return SpeechForm(
        file=file.value,
        model=text.one("model"),
        format=format,
        units=(units or ("segment",)) if format in TIMED else (),
        stream=stream,
        language=text.parsed("language", _language),
        prompt=prompt or None,
        temperature=text.parsed("temperature", _temperature),
    )


class _Texts:
    """The fields that are texts."""

    def __init__(self, parts: Mapping[str, list[FormPart]]) -> None:
        self._parts = parts

    def all(self, name: str) -> list[str]:
        return [part.text for part in self._parts.get(name, ())]

    def one(self, name: str) -> str | None:
        return next(iter(self.all(name)), None)

    def choices(self, name: str, known: tuple[str, ...]) -> list[str]:
        for value in (given := self.all(name)):
            if value not in known:
                raise bad_request(
                    f"{name} is {short_repr(value)}; it must be {' or '.join(known)}", name, "invalid_value"
                )
        return given

    def choice(self, name: str, known: tuple[str, ...]) -> str | None:
        return next(iter(self.choices(name, known)), None)

    def parsed(self, name: str, parse: Callable[[str], Any]) -> Any:
        value = self.one(name)
        return None if value is None or value == "" else parse(value)


def _language(text: str) -> str:
    if not LANGUAGE.fullmatch(text):
        raise bad_request(f"language is {short_repr(text)}; it must be a code such as en, or a name", "language")
    return text.lower()


def _temperature(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{0,20})?|\.[0-9]{1,20}", text) or not 0 <= float(text) <= 2:
        raise _out_of_range(text)
    return float(text)


def _out_of_range(text: str) -> ApiError:
    return bad_request(
        f"temperature is {short_repr(text)}; it must be a number in [0, 2]", "temperature", "out_of_range"
    )
