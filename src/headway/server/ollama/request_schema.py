"""The fields of requests to Ollama's routes and their types."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from headway.server.api.request_schema import (
    Count,
    Cutoff,
    FailAtFirst,
    Fraction,
    FunctionDefinition,
    JsonObject,
    NonNegative,
    Penalty,
    RequestSchema,
    Text,
    Texts,
    described,
)

LOADING = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "logits_all", "vocab_only", "embedding_only", "draft_num_predict"),
)
"""Options about how Ollama loads a model: accepted, and without effect, but for a `num_ctx` that the model lacks."""


class OllamaOptions(RequestSchema):
    """How tokens are chosen. Those that a request does not set are the model's own, not Ollama's."""

    off_values: ClassVar[dict[str, Any]] = {
        "penalize_newline": True,
        "tfs_z": 1,
    }

    seed: Annotated[int, described(minimum=-(2**63), exclusiveMaximum=2**64)] | None = None
    num_predict: Annotated[int, described(minimum=-2)] | None = None
    temperature: Annotated[float, described(minimum=0)] | None = None
    top_k: Annotated[int, described(minimum=-1)] | None = None
    top_p: Fraction | None = None
    min_p: Annotated[float, described(minimum=0, maximum=1)] | None = None
    typical_p: Fraction | None = None
    epsilon_cutoff: Cutoff | None = None
    eta_cutoff: Cutoff | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: Annotated[int, described(minimum=-1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
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
    stop: Text | Texts | None = None

    num_ctx: Count | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None
    draft_num_predict: int | None = None


class OllamaRequest(RequestSchema):
    """The fields that requests for text have."""

    off_values: ClassVar[dict[str, Any]] = {"images": [], "_debug_render_only": False}

    model: Text
    stream: bool | None = None  # default true
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None
    keep_alive: float | str | None = None
    truncate: bool | None = None  # a prompt that is too long is refused; ignored
    shift: bool | None = None  # a context is not shifted: a response ends where it is full; ignored


class OllamaCallFunction(RequestSchema):
    name: str
    arguments: JsonObject
    index: int | None = None


class OllamaCall(RequestSchema):
    function: OllamaCallFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(RequestSchema):
    """One message; the result of a tool names the tool it is of."""

    off_values: ClassVar[dict[str, Any]] = {"images": []}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], FailAtFirst()] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(RequestSchema):
    type: Literal["function"] | None = None
    function: FunctionDefinition


class OllamaChatRequest(OllamaRequest):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], FailAtFirst()] | None = None
    tools: Annotated[list[OllamaTool], FailAtFirst()] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """`POST /api/generate`."""

    off_values: ClassVar[dict[str, Any]] = OllamaRequest.off_values | {"template": "", "context": []}

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedRequest(RequestSchema):
    """`POST /api/embed`."""

    model: Text
    input: str | Annotated[list[str], FailAtFirst()]
    truncate: bool | None = None  # default true
    dimensions: Count | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaShowRequest(RequestSchema):
    """`POST /api/show`."""

    model: Text | None = None
    name: Text | None = None  # the older name of `model`
    verbose: bool | None = None


class OllamaEmbeddingsRequest(RequestSchema):
    """`POST /api/embeddings`, the older route for one text."""

    model: Text
    prompt: Text
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
