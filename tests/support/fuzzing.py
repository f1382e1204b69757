"""Requests drawn from the server's own description, and what every answer must be whatever was asked."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from pydantic import BaseModel
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from headway.server.anthropic.response_schema import MessageError
from headway.server.api.response_schema import ChatChunk, CompletionChunk, ErrorResponse
from headway.server.errors import ANTHROPIC, OLLAMA
from headway.server.ollama.response_schema import OllamaError
from support.live import Live

CHUNKS: dict[str, type[BaseModel]] = {"/v1/completions": CompletionChunk, "/v1/chat/completions": ChatChunk}
INSIDE = ("Traceback", "site-packages", "0x7f", 'File "', "/headway/", "/tmp/")
NARROW = {  # fields, and what they are drawn from so that most requests can be answered
    "n": {"maximum": 3},
    "best_of": {"maximum": 3},
    "max_tokens": {"maximum": 12},
    "max_completion_tokens": {"maximum": 12},
    "max_output_tokens": {"maximum": 12},
    "num_predict": {"minimum": 1, "maximum": 12},
    "min_tokens": {"maximum": 2},
    "logprobs": {"maximum": 8},
    "top_logprobs": {"maximum": 8},
    "prompt_logprobs": {"maximum": 8},
}
TEXT = {"maxLength": 40}
RESPONSE_ID = re.compile(r'"id": ?"(resp_[0-9a-f]+)"')
REQUESTS = (
    *("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"),
    *("ResponseRequest", "PromptRequest", "MessagesRequest", "CountRequest"),
    *("OllamaChatRequest", "OllamaGenerateRequest", "OllamaOptions"),
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHOSEN: dict[str, list[Any]] = {  # forms that are hard to come by at random
    "structured_outputs": [None, {"regex": "[ab]{3}"}, {"choice": ["yes", "no"]}, {"json": {"type": "integer"}}],
    "response_format": [None, {"type": "json_object"}, {"type": "text"}],
    "tools": [None, []],
    "tool_choice": [None, "auto", "none"],
    "suffix": [None, ""],
}

PROGRAM = "async def main(engine, **args):\n    return args\n"
WORDS = {"type": "string", "minLength": 1, "maxLength": 40}
OPTIONAL: dict[str, dict[str, Any]] = {  # requests of the Lab and of programs
    "TraceRequest": {"prompt": WORDS, "lens": {"enum": [None, {"k": 2}]}, "scores": {"const": 0}},
    "BranchesRequest": {"prompt": WORDS, "branches": {"enum": [[[1]], [[1, 2], [1, 3]]]}},
    "ProgramRequest": {"source": {"const": PROGRAM}, "stream": {"type": "boolean"}, "args": {"enum": [None, {"a": 1}]}},
    "InstallRequest": {"source": {"const": PROGRAM}},
}

load_all_checks()


class Fuzzer:
    """Draws requests, sends them, and looks at every answer."""

    def __init__(
        self,
        served: Live,
        session: requests.Session | None = None,
        ids: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`ids` has things that exist on the server, by the name of the path's parameter."""
        self.served, self.session = served, session or requests.Session()
        self.seen: Counter[tuple[str, int]] = Counter()  # how often an operation had a status
        self.responses: set[str] = set()  # ids of responses, which the server may have stored
        self._document = self.session.get(f"{served.url}/openapi.json", timeout=60).json()
        self._wide = self._schema(self._document)
        self._narrow = self._schema(narrowed(self._document, served.engine.vocab_size, ids or {}))

    def _schema(self, document: Any) -> Any:
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=self.served.url)
        return schema

    @property
    def operations(self) -> set[str]:
        """All operations of the document."""
        return {found.ok().label for found in self._wide.get_all_operations()}

    def rounds(self, seconds: float, number: int = 0, *, paths: Sequence[str] = (), examples: int = 15) -> None:
        """Every operation in every mode, once and then again with other seeds until the time is over.

        With `paths` only those that have a body on one of these.
        """
        over, end, first = time.monotonic() + seconds, math.inf, True
        dice = random.Random(number)
        while first or time.monotonic() < end:
            for schema, mode in (
                (self._narrow, GenerationMode.POSITIVE),
                (self._wide, GenerationMode.POSITIVE),
                (self._wide, GenerationMode.NEGATIVE),
            ):
                for found in schema.get_all_operations():
                    operation = found.ok()
                    wanted = operation.body and operation.path in paths if paths else True
                    if wanted and time.monotonic() < end and (mode is GenerationMode.POSITIVE or operation.body):
                        self._operation(operation, mode, dice.getrandbits(32), end, examples=examples)
            first, end = False, over

    def _operation(self, operation: Any, mode: GenerationMode, number: int, end: float, *, examples: int) -> None:
        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),  # type: ignore[arg-type]
            phases=(Phase.generate, Phase.shrink),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Case) -> None:
            if time.monotonic() < end:
                self.check(case)

        one()

    def check(self, case: Case) -> None:
        """Send a request; its answer must be a documented one, in its documented shape, and say nothing of the inside.

        That a request follows the description does not mean it can be answered: which ids, lengths and grammars can
        be had is for the model and the server's limits to say.
        """
        sent = case.as_transport_kwargs(base_url=self.served.url)  # case.call() would read the first events of a stream
        response = self.session.request(**sent, timeout=120)
        self.seen[case.operation.label, response.status_code] += 1
        excluded = [positive_data_acceptance, *([negative_data_rejection] if _loses_a_field(case) else [])]
        case.validate_response(response, excluded_checks=excluded)
        text = response.content.decode()
        self.responses |= set(RESPONSE_ID.findall(text))
        if response.status_code >= 400:
            error_schema(case.path).model_validate_json(text)
        elif response.headers["content-type"].startswith("text/event-stream"):
            if case.path in CHUNKS:
                check_stream(text, CHUNKS[case.path])
            else:
                assert text.endswith("}\n\n"), text[-200:]
        else:
            return
        told = [word for word in INSIDE if word in text and word not in json.dumps(_plain(case.body))]
        assert not told, (told, text[:500])


def _loses_a_field(case: Case) -> bool:
    """Whether a field is not in the request at all, though it is in the case: a form has no part for an empty list."""
    is_form = case.media_type == "multipart/form-data" and isinstance(case.body, dict)
    return is_form and any(value == [] for value in case.body.values())


def error_schema(path: str) -> type[BaseModel]:
    """What an error is in the API that a path belongs to."""
    return MessageError if path.startswith(ANTHROPIC) else OllamaError if path.startswith(OLLAMA) else ErrorResponse


def check_stream(text: str, shape: type[BaseModel]) -> None:
    """Raise unless every event has its shape, and the stream ends as streams do: with [DONE], or with an error."""
    *events, last, rest = text.split("\n\n")
    assert rest == "", text[-200:]
    for event in events:
        shape.model_validate_json(event.removeprefix("data: "))
    if last != "data: [DONE]":
        ErrorResponse.model_validate_json(last.removeprefix("data: "))


def narrowed(document: dict[str, Any], vocab: int, ids: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The description, with numbers and texts that a small model can serve: what is left out is drawn elsewhere."""
    made = copy.deepcopy(document)
    for operations in made["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in ids:
                    parameter["schema"] = {"enum": list(ids[parameter["name"]])}
    schemas = made["components"]["schemas"]
    for name in REQUESTS:
        fields = schemas[name]["properties"]
        for field in ("model", "stream_options", "previous_response_id"):
            fields.pop(field, None)
        for field, value in fields.items():
            for one in (value, *value.get("anyOf", ())):
                _tighten(field, one, vocab)
        fields |= {field: {"enum": values} for field, values in CHOSEN.items() if field in fields}
    schemas["ChatRequest"]["properties"]["tools"] = {"enum": [None, [], [TOOL]]}
    schemas["ResponseRequest"]["properties"]["input"] = {"type": "string", "minLength": 1, "maxLength": 40}
    tokenize = schemas["TokenizeRequest"]  # texts; chats are drawn elsewhere
    tokenize["properties"] = {name: tokenize["properties"][name] for name in ("prompt", "special", "return_token_strs")}
    tokenize["properties"]["prompt"], tokenize["required"] = {"type": "string", **TEXT}, ["prompt"]
    for name in ("OllamaChatRequest", "OllamaGenerateRequest"):
        schemas[name]["properties"]["model"] = {"enum": ["smollm2", "smollm2:latest"]}
    for name in ("InputMessage", "OllamaMessage"):
        roles = ["user"] if name == "InputMessage" else ["user", "assistant"]
        schemas[name]["properties"] = {"role": {"enum": roles}, "content": {"type": "string", "maxLength": 40}}
        schemas[name]["required"] = ["role", "content"]
    _simple_messages(schemas)
    for name, fields in OPTIONAL.items():
        if name in schemas:  # of routes that this server has
            schemas[name] = {"type": "object", "properties": fields, "required": list(fields)}
    return made


def _tighten(field: str, schema: dict[str, Any], vocab: int) -> None:
    match schema.get("type"):
        case "integer" | "number" if field in NARROW:
            schema |= NARROW[field]
        case "string":
            schema |= TEXT
        case "array":
            schema["maxItems"] = 4
            for item in (schema.get("items", {}), *schema.get("items", {}).get("anyOf", ())):
                _tighten("id" if item.get("type") == "integer" else "", item, vocab)
                if item.get("type") == "integer":
                    item |= {"minimum": 0, "maximum": vocab - 1}
        case "object" if field == "logit_bias":
            schema |= {"propertyNames": {"pattern": "^[1-9][0-9]?$"}, "maxProperties": 4}
    for one in schema.get("anyOf", ()) if field == "prompt" else ():
        _tighten(field, one, vocab)


def _simple_messages(schemas: dict[str, Any]) -> None:
    """Messages of people, with text."""
    message = schemas["ChatMessage"]
    message["properties"] = {
        "role": {"enum": ["user", "system", "assistant"]},
        "content": {"type": "string", "maxLength": 40},
    }
    message["required"] = ["role", "content"]


def _plain(body: Any) -> Any:
    try:
        json.dumps(body)
    except (TypeError, ValueError):
        return repr(body)
    return body
