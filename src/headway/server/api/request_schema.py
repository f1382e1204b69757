"""The fields of a request and their types, without anything that needs the model.

Unknown fields are rejected by name, unless their value is null or turns off a feature that does not exist here
(`OFF_VALUES`). Those in `IGNORED` are OpenAI's and cannot change a response: they are accepted, so that clients need
not remove them, and never used. Limits that depend on the server or the model are checked in `plan`.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from pydantic.functional_validators import BeforeValidator
from pydantic_core import PydanticCustomError

IGNORED = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
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
    "early_stopping": False,
    "id_slot": -1,
    "include_reasoning": True,
    "length_penalty": 1,
    "logits_processors": [],
    "lora": [],
    "mm_processor_kwargs": {},
    "n_probs": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "reasoning_format": "auto",
    "return_progress": False,
    "return_tokens_as_token_ids": False,
    "separate_reasoning": True,
    "spaces_between_special_tokens": True,
    "tfs_z": 1,
    "timings_per_token": False,
    "top_a": 0,
    "use_beam_search": False,
    "vllm_xargs": {},
}
"""Fields of other servers that are not supported, and the value that changes nothing, which is accepted."""


CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields of messages, parts and tools that say what to cache. They are not used: every prefix is cached by itself."""


class FailAtFirst(FailFast):
    """Validation of a list stops at its first error, so that a million wrong entries make one error."""

    def __hash__(self) -> int:  # type: ignore[override]  # its place in a union needs one
        return id(self)


def described(**schema: Any) -> Any:
    """What the OpenAPI document says about a value in addition to its type. It is checked in `plan`."""
    return Field(json_schema_extra=schema)


def _check_object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "Input should be a valid dictionary")
    return value


JsonObject = Annotated[Any, AfterValidator(_check_object), described(type="object")]
"""An object of any members, as it is: pydantic would visit each of them in one call."""

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
    unused: ClassVar[frozenset[str]] = frozenset()  # those that are accepted with any

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, value: Any) -> Any:
        """Reject the first unknown field that asks for something; drop the others."""
        if not isinstance(value, dict):
            return value
        known = _known_fields(cls)
        unknown = [name for name in value if name not in known]
        for name in unknown:
            if (
                name not in cls.unused
                and value[name] is not None
                and not _is_off(value[name], cls.off_values.get(name))
            ):
                raise PydanticCustomError("unknown_field", "unknown", {"name": str(name)})
        return {name: one for name, one in value.items() if name in known} if unknown else value


@cache
def _known_fields(schema: type[BaseModel]) -> frozenset[str]:
    return frozenset(info.alias or name for name, info in schema.model_fields.items())


def _is_off(value: Any, off: Any) -> bool:
    """Whether a value is the one that turns its feature off; 1.0 is 1, and True is not."""
    return off is not None and isinstance(value, bool) == isinstance(off, bool) and value == off


class StreamOptions(RequestSchema):
    """What a stream contains in addition to its text."""

    off_values: ClassVar[dict[str, Any]] = {"continuous_usage_stats": False}

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
    repeat_penalty: Penalty | None = None  # its name on llama-server
    dry_multiplier: Annotated[float, described(minimum=0)] | None = None
    dry_base: Annotated[float, described(minimum=1, maximum=100)] | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Annotated[int, described(minimum=-1)] | None = None
    dry_sequence_breakers: Texts | None = None
    xtc_probability: Annotated[float, described(minimum=0, maximum=1)] | None = None
    xtc_threshold: Annotated[float, described(minimum=0, maximum=1)] | None = None
    mirostat: Annotated[int, described(minimum=0, maximum=2)] | None = None
    mirostat_tau: Annotated[float, described(minimum=0, maximum=1000)] | None = None
    mirostat_eta: Annotated[float, described(minimum=0, maximum=1000)] | None = None
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

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    prompt_logprobs: NonNegative | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None  # GBNF or Lark; empty: none, as llama-server has it

    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, described(minimum=-1)] | None = None

    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
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
    unused: ClassVar[frozenset[str]] = CACHE_MARKS

    type: Literal["function"]
    function: FunctionDefinition


class CustomGrammar(RequestSchema):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(RequestSchema):
    """What a custom tool takes: any text, or one that follows a grammar."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomDefinition(RequestSchema):
    """A tool that takes one text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class CustomToolDefinition(RequestSchema):
    type: Literal["custom"]
    custom: CustomDefinition


class CustomFunction(FunctionDefinition):
    """A custom tool as a function with one argument, `input`: the form in which models know tools."""

    lark: str | None = None  # the grammar of the text

    @classmethod
    def of(cls, tool: CustomDefinition) -> CustomFunction:
        text: dict[str, Any] = {"type": "string"}
        grammar = None if tool.format is None or tool.format.type == "text" else tool.format.grammar
        description = tool.description or ""
        if grammar is not None and grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        elif grammar is not None:
            description = f"{description}\nThe input follows this Lark grammar:\n{grammar.definition}".strip()
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return cls(
            name=tool.name,
            description=description or None,
            parameters=parameters | {"additionalProperties": False},
            strict=True,
            lark=None if grammar is None or grammar.syntax == "regex" else grammar.definition,
        )


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool, as that of a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


class NamedFunction(RequestSchema):
    name: str


class NamedTool(RequestSchema):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomTool(RequestSchema):
    type: Literal["custom"]
    custom: NamedFunction


def one_of(function: Any, custom: Any, convert: Any) -> Any:
    """A type that takes both kinds of tools, by their `type`, and makes a function's of a custom one's."""

    def kind(value: Any) -> str:
        type = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return custom.__name__ if type == "custom" else function.__name__

    def known(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "mcp":
            raise PydanticCustomError("mcp_tool", "chats have no tools of MCP servers; use /v1/responses")
        return value

    tagged: list[Any] = [Annotated[one, Tag(one.__name__)] for one in (function, custom)]
    both = tagged[0] | tagged[1]
    return Annotated[
        both,
        Discriminator(kind),
        AfterValidator(lambda one: convert(one) if isinstance(one, custom) else one),
        BeforeValidator(known),
    ]


def _as_function_tool(tool: CustomToolDefinition) -> ToolDefinition:
    if (format := tool.custom.format) is not None and (format.type == "grammar") != (format.grammar is not None):
        raise ValueError("a format of type grammar has a grammar, and one of type text has none")
    return ToolDefinition(type="function", function=CustomFunction.of(tool.custom))


def _as_named_tool(tool: NamedCustomTool) -> NamedTool:
    return NamedTool(type="function", function=tool.custom)


if TYPE_CHECKING:
    AnyTool: TypeAlias = ToolDefinition
    AnyNamedTool: TypeAlias = NamedTool
else:
    AnyTool = one_of(ToolDefinition, CustomToolDefinition, _as_function_tool)
    AnyNamedTool = one_of(NamedTool, NamedCustomTool, _as_named_tool)


class AllowedTools(RequestSchema):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamedTool], FailAtFirst(), Field(min_length=1)]


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
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # of JSON, as llama-server has it


class ContentPart(RequestSchema):
    """One part of a message's content."""

    unused: ClassVar[frozenset[str]] = CACHE_MARKS

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


class MessageCustomCall(RequestSchema):
    name: str
    input: str


class MessageCustomToolCall(RequestSchema):
    """A call of a custom tool."""

    id: str
    type: Literal["custom"]
    custom: MessageCustomCall
    index: int | None = None


def _as_function_call(call: MessageCustomToolCall) -> MessageToolCall:
    arguments = custom_arguments(call.custom.input)
    return MessageToolCall(id=call.id, function=MessageFunctionCall(name=call.custom.name, arguments=arguments))


if TYPE_CHECKING:
    AnyToolCall: TypeAlias = MessageToolCall
else:
    AnyToolCall = one_of(MessageToolCall, MessageCustomToolCall, _as_function_call)


class ChatMessage(RequestSchema):
    """One message of a chat, of any role. Clients may send back messages with all fields that responses have."""

    unused: ClassVar[frozenset[str]] = CACHE_MARKS | {"provider_specific_fields"}  # the last is litellm's own

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], FailAtFirst()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[AnyToolCall], FailAtFirst()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # its name on other servers
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: MessageFunctionCall | None = None  # OpenAI's older form of tool_calls
    parsed: Any = None  # added by client libraries; ignored


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    off_values: ClassVar[dict[str, Any]] = OFF_VALUES | {"echo": False, "add_special_tokens": False}

    messages: Annotated[list[ChatMessage], FailAtFirst(), described(minItems=1)]
    max_completion_tokens: Count | None = None
    best_of: Count | None = None  # with beams
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[AnyTool], FailAtFirst()] | None = None
    tool_choice: Literal["none", "auto", "required"] | AnyNamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], FailAtFirst()] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: NonNegative | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[list[Literal["text"]], FailAtFirst()] | None = None


class TokenizeRequest(RequestSchema):
    """`POST /tokenize`: a text, or a chat in the model's template."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # the text, as clients of llama-server name it
    messages: Annotated[list[ChatMessage], FailAtFirst()] | None = None
    tools: Annotated[list[AnyTool], FailAtFirst()] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
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
    base_model_name: Text | None = None  # the model that it is for, where the server has several
    load_inplace: bool | None = None  # replace an adapter of this name


class UnloadAdapterRequest(RequestSchema):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Text


class DetokenizeRequest(RequestSchema):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids
