"""The fields of a request and their types, without anything that needs the model.

Unknown fields are rejected by name, unless their value is null or turns off a feature that does not exist here
(`OFF_VALUES`). Those in `IGNORED` are OpenAI's and cannot change a response: they are accepted, so that clients need
not remove them, and never used. Limits that depend on the server or the model are checked in `plan`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

IGNORED = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields of OpenAI's API that are accepted and have no effect: about users, storage and billing."""


OFF_VALUES: dict[str, Any] = {
    "cache_prompt": True,
    "detokenize": True,
    "documents": [],
    "dry_multiplier": 0,
    "early_stopping": False,
    "length_penalty": 1,
    "logits_processors": [],
    "mirostat": 0,
    "mm_processor_kwargs": {},
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "repeat_penalty": 1,
    "spaces_between_special_tokens": True,
    "tfs_z": 1,
    "top_a": 0,
    "use_beam_search": False,
    "vllm_xargs": {},
    "xtc_probability": 0,
}
"""Fields of other servers that are not supported, and the value that changes nothing, which is accepted."""


class FailAtFirst(FailFast):
    """Validation of a list stops at its first error, so that a million wrong entries make one error."""

    def __hash__(self) -> int:  # type: ignore[override]  # its place in a union needs one
        return id(self)


def described(**schema: Any) -> Any:
    """What the OpenAPI document says about a value in addition to its type. It is checked in `plan`."""
    return Field(json_schema_extra=schema)


Id = Annotated[int, described(minimum=0)]
Ids = Annotated[list[Id], FailAtFirst()]
NonEmptyIds = Annotated[list[Id], FailAtFirst(), described(minItems=1)]
Text = Annotated[str, described(minLength=1)]
Texts = Annotated[list[Text], FailAtFirst()]
WordList = Annotated[list[Text | NonEmptyIds], FailAtFirst()]
Count = Annotated[int, described(minimum=1)]
NonNegative = Annotated[int, described(minimum=0)]
Cutoff = Annotated[float, described(minimum=0, exclusiveMaximum=1)]
Fraction = Annotated[float, described(exclusiveMinimum=0, maximum=1)]
Penalty = Annotated[float, described(exclusiveMinimum=0)]


class RequestSchema(BaseModel):
    """One object of a body: unknown fields, other types, NaN and infinities are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    off_values: ClassVar[dict[str, Any]] = {}  # unknown fields that are accepted with this value

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, value: Any) -> Any:
        """Reject the first unknown field that asks for something; drop the others."""
        if not isinstance(value, dict):
            return value
        known = {info.alias or name for name, info in cls.model_fields.items()}
        unknown = [name for name in value if name not in known]
        for name in unknown:
            if value[name] is not None and not _is_off(value[name], cls.off_values.get(name)):
                raise PydanticCustomError("unknown_field", "unknown", {"name": str(name)})
        return {name: one for name, one in value.items() if name in known} if unknown else value


def _is_off(value: Any, off: Any) -> bool:
    """Whether a value is the one that turns its feature off; 1.0 is 1, and True is not."""
    return off is not None and isinstance(value, bool) == isinstance(off, bool) and value == off


class StreamOptions(RequestSchema):
    """What a stream contains in addition to its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; ignored


class StructuredOutputs(RequestSchema):
    """The format of the text: exactly one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None


BIAS = described(additionalProperties={"type": "number"}, propertyNames={"pattern": "^[0-9]{1,18}$"})


class SamplingFields(RequestSchema):
    """How tokens are chosen: the fields that requests for text have in every API here."""

    off_values: ClassVar[dict[str, Any]] = OFF_VALUES

    seed: Annotated[int, described(minimum=-(2**63), exclusiveMaximum=2**64)] | None = None
    priority: Annotated[float, described(minimum=-1000, maximum=1000)] | None = None

    temperature: Annotated[float, described(minimum=0)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, described(minimum=-1)] | None = None
    min_p: Annotated[float, described(minimum=0, maximum=1)] | None = None
    typical_p: Fraction | None = None
    epsilon_cutoff: Cutoff | None = None
    eta_cutoff: Cutoff | None = None
    repetition_penalty: Penalty | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, Any], BIAS] | None = None  # values are checked after their number
    allowed_token_ids: NonEmptyIds | None = None
    bad_words: WordList | None = None
    min_tokens: NonNegative | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class GenerationRequest(SamplingFields):
    """The fields that all requests for text in OpenAI's older APIs have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None

    max_tokens: NonNegative | None = None
    stop: Text | Texts | None = None

    prompt_logprobs: NonNegative | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    structured_outputs: StructuredOutputs | None = None

    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, described(minimum=-1)] | None = None

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


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    off_values: ClassVar[dict[str, Any]] = OFF_VALUES | {"add_special_tokens": True}

    prompt: Annotated[Any, Field(json_schema_extra=PROMPT)]  # parsed in `prompts`, not by trying each type
    suffix: str | None = None
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: NonNegative | None = None


class FunctionDefinition(RequestSchema):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(RequestSchema):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestSchema):
    name: str


class NamedTool(RequestSchema):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestSchema):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FailAtFirst(), Field(min_length=1)]


class AllowedToolChoice(RequestSchema):
    """Only these tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(RequestSchema):
    """A schema that the response must follow; it always does, `strict` or not."""

    name: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestSchema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ContentPart(RequestSchema):
    """One part of a message's content."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file", "video_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None


class MessageFunctionCall(RequestSchema):
    name: str
    arguments: str
    parsed_arguments: Any = None  # added by client libraries; ignored


class MessageToolCall(RequestSchema):
    """A tool call in an earlier message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: MessageFunctionCall
    index: int | None = None


class ChatMessage(RequestSchema):
    """One message of a chat, of any role. Clients may send back messages with all fields that responses have."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], FailAtFirst()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], FailAtFirst()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: MessageFunctionCall | None = None  # OpenAI's older form of tool_calls
    parsed: Any = None  # added by client libraries; ignored


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    off_values: ClassVar[dict[str, Any]] = OFF_VALUES | {"best_of": 1, "echo": False, "add_special_tokens": False}

    messages: Annotated[list[ChatMessage], FailAtFirst(), described(minItems=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolDefinition], FailAtFirst()] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], FailAtFirst()] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[list[Literal["text"]], FailAtFirst()] | None = None


class TokenizeRequest(RequestSchema):
    """`POST /tokenize`: a text, or a chat in the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FailAtFirst()] | None = None
    tools: Annotated[list[ToolDefinition], FailAtFirst()] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    special: bool | None = None
    return_token_strs: bool | None = None


class LoadAdapterRequest(RequestSchema):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool | None = None  # replace an adapter of this name


class UnloadAdapterRequest(RequestSchema):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Text


class DetokenizeRequest(RequestSchema):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids
