"""The fields of a request, as they come over the wire: their types, and nothing that needs the model.

A field that is not here is refused by name. Those of `IDLE` are OpenAI's and cannot change an answer: they are read,
so that a client need not leave them out, and nothing looks at them. Bounds that depend on the server or the model are
checked where a request is planned.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

IDLE = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields of OpenAI's that are accepted and have no effect: whose request it is, where it is kept, how it is billed."""


class First(FailFast):
    """A list is refused at the first thing that is wrong with it: a million wrong entries make one error."""

    def __hash__(self) -> int:  # type: ignore[override]  # its place in a union needs one
        return id(self)


def shown(**schema: Any) -> Any:
    """What the description says of a value beside its type. It is checked where a request is planned."""
    return Field(json_schema_extra=schema)


Id = Annotated[int, shown(minimum=0)]
Ids = Annotated[list[Id], First()]
Some = Annotated[list[Id], First(), shown(minItems=1)]
Text = Annotated[str, shown(minLength=1)]
Texts = Annotated[list[Text], First()]
Words = Annotated[list[Text | Some], First()]
Count = Annotated[int, shown(minimum=1)]
Number = Annotated[int, shown(minimum=0)]
Share = Annotated[float, shown(exclusiveMinimum=0, maximum=1)]
Penalty = Annotated[float, shown(exclusiveMinimum=0)]


class Wire(BaseModel):
    """One object of a body: unknown fields, other types, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_other(cls, value: Any) -> Any:
        """The first unknown field is enough to refuse it."""
        if isinstance(value, dict):
            known = {info.alias or name for name, info in cls.model_fields.items()}
            for name in value:
                if name not in known:
                    raise PydanticCustomError("unknown_field", "unknown", {"name": str(name)})
        return value


class StreamOptions(Wire):
    """What a stream has beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers, which changes nothing for the reader


class StructuredOutputs(Wire):
    """What the text must look like; one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None


BIAS = shown(additionalProperties={"type": "number"}, propertyNames={"pattern": "^[0-9]{1,18}$"})


class Knobs(Wire):
    """What requests for text have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    seed: Annotated[int, shown(minimum=-(2**63), exclusiveMaximum=2**64)] | None = None
    priority: Annotated[float, shown(minimum=-1000, maximum=1000)] | None = None

    temperature: Annotated[float, shown(minimum=0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, shown(minimum=-1)] | None = None
    min_p: Annotated[float, shown(minimum=0, maximum=1)] | None = None
    typical_p: Share | None = None
    repetition_penalty: Penalty | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, Any], BIAS] | None = None  # its numbers are looked at once there are not too many
    allowed_token_ids: Some | None = None
    bad_words: Words | None = None

    max_tokens: Number | None = None
    min_tokens: Number | None = None
    stop: Text | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None

    prompt_logprobs: Number | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    structured_outputs: StructuredOutputs | None = None

    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None


PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1},
    ]
}


class CompletionRequest(Knobs):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, Field(json_schema_extra=PROMPT)]  # told apart in `prompts`, not by trying each form
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: Number | None = None


class Function(Wire):
    """A tool that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class NamedFunction(Wire):
    name: str


class NamedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Wire):
    """A schema that an answer has to follow; it always does, `strict` or not."""

    name: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Part(Wire):
    """One part of a message's content."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file", "video_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None


class CalledFunction(Wire):
    name: str
    arguments: str
    parsed_arguments: Any = None  # what a client made of them


class Call(Wire):
    """A call that an assistant made earlier, as a client got it."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Wire):
    """One message of a chat, of any role. A client may send one back with all the fields that answers can have."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], First()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], First()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None  # what a client made of the content


class ChatRequest(Knobs):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], First(), shown(minItems=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], First()] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], First()] | None = None


class TokenizeRequest(Wire):
    """`POST /tokenize`: of a text, or of a chat as its template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], First()] | None = None
    tools: Annotated[list[Tool], First()] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    special: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids
