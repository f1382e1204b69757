"""Requests to Ollama's routes as requests for a chat, and their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headway.base.json_text import write
from headway.base.specs.generation import parameters_of
from headway.base.text import short_repr
from headway.program.chat.tools import ToolSet
from headway.program.constraints.grammar import Grammar
from headway.program.engine import Engine
from headway.server.api.checks import RequestChecks
from headway.server.api.penalty_window import counts_prompt, penalty_fields
from headway.server.api.plan import check_size, grammar_of, plan_request
from headway.server.api.prompts import read_prompts
from headway.server.api.request_schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    JsonSchema,
    MessageFunctionCall,
    MessageToolCall,
    ResponseFormat,
    ToolDefinition,
)
from headway.server.chats.fields import template_reads
from headway.server.chats.message_stream import ToolPolicy
from headway.server.chats.messages import ChatPrompt, template_reasons
from headway.server.chats.plan import ChatPlan, plan_chat
from headway.server.errors import bad_request
from headway.server.keys import Tenant
from headway.server.models import ModelLease
from headway.server.ollama.request_schema import (
    OllamaCall,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
)
from headway.server.serving import Serving

FIELDS = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "stop": "options.stop",
}
"""Names of fields of a chat, as errors about a request here have them."""
OPTIONS = parameters_of("ollama")
NO_LIMIT = (-1, -2)  # as many tokens as there may be, and as fit into the context: the same here
ANY_SEED = -1


async def plan_ollama(
    body: OllamaChatRequest | OllamaGenerateRequest, serving: Serving, tenant: Tenant, lease: ModelLease
) -> ChatPlan:
    """The plan of a request that passes all checks. Called with a place in the queue."""
    options = _options(body, lease.engine)
    if isinstance(body, OllamaGenerateRequest) and (body.raw or body.suffix):
        plan = await _plan_raw(body, options, serving, tenant, lease)
    else:
        chat = await serving.readers.run(lambda: chat_request(body, options, lease.engine))
        plan = await plan_chat(chat, serving, tenant, lease)
    last = None if body.options is None else body.options.repeat_last_n
    return replace(plan, request=replace(plan.request, penalize_prompt=counts_prompt(last)))


def _options(body: OllamaRequest, engine: Engine) -> dict[str, Any]:
    given = body.options
    if given is None:
        return {}
    limit = engine.config.max_positions
    if given.num_ctx is not None and given.num_ctx > limit:
        raise bad_request(
            f"options.num_ctx is {given.num_ctx}; this model's context length is {limit}", "options.num_ctx"
        )
    fields = {option.name: getattr(given, option.name_on("ollama")) for option in OPTIONS}
    fields["max_tokens"] = None if given.num_predict in NO_LIMIT else given.num_predict
    fields["seed"] = None if given.seed == ANY_SEED else given.seed
    fields = {name: value for name, value in fields.items() if value is not None}
    return fields | penalty_fields(given.repeat_last_n, fields, engine, "options.repeat_last_n")


def chat_request(
    body: OllamaChatRequest | OllamaGenerateRequest, options: dict[str, Any], engine: Engine
) -> ChatRequest:
    """The request as one for a chat; `options` are its sampling parameters."""
    fields = options | _thinking(body, engine)
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise bad_request("top_logprobs requires logprobs: true", "top_logprobs")
    if body.format:
        fields["response_format"] = _format(body.format)
    if isinstance(body, OllamaChatRequest):
        tools = [ToolDefinition(type="function", function=tool.function) for tool in body.tools or ()]
        return ChatRequest(messages=_messages(body.messages or ()), tools=tools or None, **fields)
    system = [] if not body.system else [ChatMessage(role="system", content=body.system)]
    return ChatRequest(messages=[*system, ChatMessage(role="user", content=body.prompt or "")], **fields)


def _format(format: str | dict[str, Any]) -> ResponseFormat:
    if isinstance(format, str):
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="format", schema=format))


def _thinking(body: OllamaRequest, engine: Engine) -> dict[str, Any]:
    """`think` as the template takes it. Asking a model for reasoning that has none is an error."""
    if body.think is None:
        return {}
    switch, effort = (template_reads(engine.chat_template, name) for name in ("enable_thinking", "reasoning_effort"))
    if isinstance(body.think, str) and effort:
        return {"reasoning_effort": body.think}
    if switch:
        return {"chat_template_kwargs": {"enable_thinking": body.think is not False}}
    if body.think and not template_reasons(engine):
        raise bad_request(
            f"think is {body.think!r}, and this model's chat template has no reasoning; remove it", "think"
        )
    return {}  # a model that always reasons


async def _plan_raw(
    body: OllamaGenerateRequest,
    options: dict[str, Any],
    serving: Serving,
    tenant: Tenant,
    lease: ModelLease,
) -> ChatPlan:
    """A prompt as it is, without the model's template; with a suffix, one for what is between the two."""
    cause = "raw" if body.raw else "suffix"
    for field in ("system", "think"):
        if getattr(body, field):
            raise bad_request(f"{field} is for the template, which {cause} leaves out; remove one of them", field)
    check = RequestChecks(serving, lease.engine)
    top = (body.top_logprobs or 0) if body.logprobs else None
    request = CompletionRequest(prompt=body.prompt or "", **options)
    grammar = None if not body.format else await serving.readers.run(_grammar, body.format, check)
    plan = await plan_request(request, serving, tenant, lease, top_logprobs=top, grammar=grammar)
    (prompt,) = await read_prompts(request.prompt, check, suffix=body.suffix or None)
    max_tokens = check.in_range("max_tokens", request.max_tokens, 1, check.engine.config.max_positions)
    limit = check.max_new_tokens(len(prompt.ids), max_tokens, 0, "prompt")
    check.response_logprobs(False, limit, top, "top_logprobs")
    raw = ChatPrompt(prompt.ids, prompt.text, None, ToolSet([]), None, continues=True)
    return ChatPlan(plan, raw, ToolPolicy(max_tokens=limit))


def _grammar(format: str | dict[str, Any], check: RequestChecks) -> Grammar:
    if isinstance(format, str):
        return Grammar.json_object()
    check_size(format, "format", check.settings)
    return grammar_of(lambda: Grammar.json_schema(format), "format")


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """Messages with ids for calls, which Ollama's do not have: a result belongs to the first call it may be of."""
    waiting: list[MessageToolCall] = []  # calls without a result
    result: list[ChatMessage] = []
    count = 0
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role == "tool":
            call = _answered(message, waiting, where)
            waiting.remove(call)
            result.append(ChatMessage(role="tool", tool_call_id=call.id, content=message.content or ""))
            continue
        calls = [_call(call, count + j) for j, call in enumerate(message.tool_calls or ())]
        count += len(calls)
        waiting += calls
        if message.role != "assistant" and (calls or message.thinking):
            raise bad_request(f"{where} has tool_calls or thinking, which only an assistant's messages have", where)
        content = None if calls and not message.content else message.content or ""
        result.append(
            ChatMessage(
                role=message.role,
                content=content,
                reasoning_content=message.thinking or None,
                tool_calls=calls or None,
            )
        )
    return result


def _call(call: OllamaCall, number: int) -> MessageToolCall:
    arguments = write(call.function.arguments)
    function = MessageFunctionCall(name=call.function.name, arguments=arguments)
    return MessageToolCall(id=call.id or f"call{number:05d}", function=function)


def _answered(message: OllamaMessage, waiting: Sequence[MessageToolCall], where: str) -> MessageToolCall:
    for call in waiting:
        if message.tool_name in (None, call.function.name) and message.tool_call_id in (None, call.id):
            return call
    named = message.tool_name or message.tool_call_id or "a tool"
    raise bad_request(f"{where} is the result of {short_repr(named)}, and no earlier call waits for it", where)
