"""`POST /v1/chat/completions`: generates the next message of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.program.constraints.grammar import Grammar
from headway.program.context import Context
from headway.server.adapters import ServedAdapter
from headway.server.errors import bad_request
from headway.server.keys import Tenant
from headway.server.openai.chat_fields import modern_request, template_variables
from headway.server.openai.checks import RequestChecks
from headway.server.openai.message_stream import MessageDelta, MessageStream, ToolPolicy, call_id
from headway.server.openai.messages import ChatPrompt, read_chat_prompt, texts_of
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.plan import RequestPlan, check_size, check_tools, grammar_of, plan_request
from headway.server.openai.prompts import Prompt, score_prompt, scored_tokens
from headway.server.openai.request_schema import ChatRequest, NamedTool
from headway.server.openai.respond import TokenUsage, check_stream_options, requested_adapter, respond
from headway.server.openai.response_schema import ChatCompletion, whole_or_stream
from headway.server.openai.streaming import Put, forks, run_all
from headway.server.openai.tokens import ScoredToken, chat_logprobs, prompt_logprobs
from headway.server.serving import AdmittedRequest, Serving
from headway.server.settings import ServerSettings
from headway.text.replies.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions", summary="Generate the next message of a chat", responses=whole_or_stream(ChatCompletion)
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The assistant's next message, whole or as a stream of server-sent events."""
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    adapter = requested_adapter(serving, body.model)
    check_stream_options(body)
    with serving.queue_slot(tenant):
        job = await _plan_chat(body, serving, tenant, adapter)
    name = None if adapter is None else adapter.name
    return await respond(serving, request, body, job, tokens=job.tokens, model=name)


async def _plan_chat(body: ChatRequest, serving: Serving, tenant: Tenant, adapter: ServedAdapter | None) -> ChatJob:
    """The job of a request that passes all checks, with its prompt."""
    check = RequestChecks(serving)
    engine, threads = check.engine, check.threads
    body = modern_request(body)
    policy, grammar = _tool_policy(body), await threads.run(_response_format, body, check.settings)
    plan = await plan_request(body, serving, tenant, top_logprobs=_top_logprobs(body), grammar=grammar, adapter=adapter)
    prompt = await threads.run(_read_prompt, body, check)
    await plan.prepare(await threads.run(_argument_grammars, prompt, policy), "tools")
    max_tokens = check.in_range("max_tokens", _max_tokens(body), 1, engine.config.max_positions)
    prompt = replace(prompt, ids=check.truncated(prompt.ids, body.truncate_prompt_tokens, max_tokens))
    limit = check.max_new_tokens(len(prompt.ids), max_tokens, plan.min_tokens, "messages")
    if max_tokens is None and (default := engine.generation_defaults.max_new_tokens) is not None:
        limit = min(limit, default)
    check.prompt_logprobs("prompt_logprobs", len(prompt.ids), plan.prompt_logprobs)
    check.response_logprobs(body.stream, plan.count * limit, plan.top_logprobs)
    return ChatJob(body, plan, prompt, ToolPolicy(policy.must_call, policy.strict, policy.one_call, limit))


def _read_prompt(body: ChatRequest, check: RequestChecks) -> ChatPrompt:
    tools = [] if body.tool_choice == "none" else body.tools or []
    check_tools(tools, check.settings)
    if body.truncate_prompt_tokens is None:
        check.text(texts_of(body.messages), "messages")
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message continues the last message and add_generation_prompt begins another; remove one "
            "of them",
            "continue_final_message",
        )
    return read_chat_prompt(
        body.messages,
        tools,
        check.engine,
        cue=body.add_generation_prompt is not False,
        continue_last=bool(body.continue_final_message),
        variables=template_variables(
            body.chat_template_kwargs, check.engine, effort=body.reasoning_effort, verbosity=body.verbosity
        ),
    )


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs requires logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(f"max_tokens is {old} and max_completion_tokens is {new}; pass one of them", "max_tokens")
    return old if new is None else new


def _tool_policy(body: ChatRequest) -> ToolPolicy:
    """Which tool calls the message must or may have."""
    names = [tool.function.name for tool in body.tools or ()]
    strict = frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return ToolPolicy(None, strict, body.parallel_tool_calls is False)
    name = choice.function.name if isinstance(choice, NamedTool) else ""
    if not names:
        raise bad_request("tool_choice requires a call, and there are no tools; pass some in tools", "tool_choice")
    if name and name not in names:
        raise bad_request(f"tool_choice names {name!r:.80}; the tools are {', '.join(names)}", "tool_choice")
    return ToolPolicy(name, strict, True)


def _response_format(body: ChatRequest, settings: ServerSettings) -> Grammar | None:
    format = body.response_format
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar.json_object()
    if format.json_schema is None:
        raise bad_request("response_format of type json_schema has no json_schema; pass one", "response_format")
    where, schema = "response_format.json_schema.schema", format.json_schema.schema_
    if schema is None:
        return Grammar.json_object()
    check_size(schema, where, settings)
    return grammar_of(lambda: Grammar.json_schema(schema), where)


def _argument_grammars(prompt: ChatPrompt, policy: ToolPolicy) -> list[Grammar]:
    """The grammars that arguments of calls will be constrained by."""
    names = prompt.tools.names
    if policy.must_call is None:
        names = tuple(name for name in names if name in policy.strict)
    elif policy.must_call:
        names = (policy.must_call,)
    grammars = [grammar_of(lambda tool=prompt.tools.get(name): tool.arguments, f"tools ({name})") for name in names]
    if policy.must_call == "" and len(names) > 1 and prompt.form is not None:
        border = prompt.form.border
        grammars.append(Grammar.choices(name + border for name in names))
    return grammars


@dataclass(frozen=True)
class ChoiceDelta:
    """New text and tokens of one choice."""

    index: int
    message: MessageDelta


@dataclass
class ChoiceState:
    """One choice so far."""

    contents: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: str | None = None
    begun: bool = False  # whether its first chunk was sent
    unsent: list[ScoredToken] = field(default_factory=list)  # tokens for the next chunk


class ChatJob:
    """The generation of one request, and its response."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, plan: RequestPlan, prompt: ChatPrompt, policy: ToolPolicy) -> None:
        self._body, self._plan, self._prompt, self._policy = body, plan, prompt, policy
        self._choices = [ChoiceState() for _ in range(plan.count)]
        self._scores: list[Any] | None = None
        self.usage = TokenUsage(prompt=len(prompt.ids))
        self.tokens = len(prompt.ids) + plan.count * policy.max_tokens  # upper bound of what is computed

    async def run(self, put: Put[ChoiceDelta]) -> None:
        async with self._plan.context() as home:
            await self._fill_prompt(home)
            async with forks(home, self._plan.count, self._plan.adapters) as contexts:
                await run_all(self._generate(one, i, put) for i, one in enumerate(contexts))
            self.usage.cached += home.cached_tokens

    async def _fill_prompt(self, home: Context) -> None:
        k, ids = self._plan.prompt_logprobs, self._prompt.ids
        if k is None:
            home.fill(ids)
            return
        scores, engine = await score_prompt(home, ids, k, self._plan.adapters), self._plan.engine
        prompt = Prompt(ids, "", False)
        self._scores = await self._plan.writers.run(
            lambda: prompt_logprobs(scored_tokens(prompt, scores, k, engine), engine)
        )

    @property
    def _legacy(self) -> bool:
        """Whether the client passed functions, and gets function_call instead of tool_calls."""
        return bool(self._body.functions)

    async def _generate(self, context: Context, number: int, put: Put[ChoiceDelta]) -> None:
        stream = MessageStream(self._plan, self._prompt, self._policy, context, number)
        async for message in stream.deltas():
            if message.parts or message.tokens or message.new or message.finish:
                await put(ChoiceDelta(number, message))
        self.usage.completion += stream.count

    # -- the response ----------------------------------------------------------------------------------------------

    def add(self, delta: ChoiceDelta, admitted: AdmittedRequest) -> None:
        message, choice = delta.message, self._choices[delta.index]
        if message.new > 0:
            admitted.tokens(message.new, choice=delta.index)
        if message.finish is not None:
            admitted.finish(message.finish)
            choice.finish = self._finish_reason(message.finish)
        if self._body.stream:
            return
        choice.tokens += message.tokens
        for part in message.parts:
            self._keep(part, choice)

    def _finish_reason(self, finish: str) -> str:
        return "function_call" if finish == "tool_calls" and self._legacy else finish

    def _keep(self, part: Part, choice: ChoiceState) -> None:
        match part:
            case Content(text):
                choice.contents.append(text)
            case Reasoning(text):
                choice.reasonings.append(text)
            case ToolCallStart(index, name):
                choice.calls[index] = self._call(name)
                choice.arguments[index] = []
            case ToolCallArguments(index, delta):
                choice.arguments[index].append(delta)

    def _call(self, name: str) -> dict[str, Any]:
        return {"id": call_id(self._prompt.format), "type": "function", "function": {"name": name, "arguments": ""}}

    def response(self) -> dict[str, Any]:
        result: dict[str, Any] = {"choices": [self._choice(i, choice) for i, choice in enumerate(self._choices)]}
        if self._scores is not None:
            result["prompt_logprobs"] = self._scores
        return result | self._prompt_ids()

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompt.ids)} if self._body.return_token_ids else {}

    def _token_ids(self, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
        return {"token_ids": [token.id for token in tokens]} if self._body.return_token_ids else {}

    def _choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        content = "".join(choice.contents)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasonings:
            message["reasoning_content"] = "".join(choice.reasonings)
        if choice.calls:
            message["content"] = content or None
            calls = [
                call | {"function": call["function"] | {"arguments": "".join(choice.arguments[i])}}
                for i, call in choice.calls.items()
            ]
            message |= {"function_call": calls[0]["function"]} if self._legacy else {"tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.tokens, self._plan.engine) if self._body.logprobs else None,
            "finish_reason": choice.finish,
            **self._token_ids(choice.tokens),
        }

    def chunk_size(self, deltas: Iterable[ChoiceDelta]) -> int:
        if not self._body.logprobs or self._plan.top_logprobs is None:
            return 0
        return sum(len(delta.message.tokens) for delta in deltas) * (self._plan.top_logprobs + 1)

    @property
    def response_size(self) -> int:
        generated = sum(len(choice.tokens) for choice in self._choices) * ((self._plan.top_logprobs or 0) + 1)
        prompt = 0 if self._plan.prompt_logprobs is None else self.usage.prompt * (self._plan.prompt_logprobs + 1)
        return generated + prompt

    def chunks(self, delta: ChoiceDelta) -> Iterable[dict[str, Any]]:
        choice = self._choices[delta.index]
        choice.unsent += delta.message.tokens
        if not choice.begun:
            choice.begun = True
            yield self._chunk(delta.index, {"role": "assistant", "content": "", "refusal": None}) | self._prompt_ids()
        for part in delta.message.parts:
            if (fields := self._delta_fields(part)) is not None:
                yield self._chunk(delta.index, fields, choice)
        if delta.message.finish is not None:
            yield self._chunk(delta.index, {}, choice, self._finish_reason(delta.message.finish))

    def _delta_fields(self, part: Part) -> dict[str, Any] | None:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCallStart(_, name) if self._legacy:
                return {"function_call": self._call(name)["function"]}
            case ToolCallArguments(_, more) if self._legacy:
                return {"function_call": {"arguments": more}}
            case ToolCallStart(index, name):
                return {"tool_calls": [{"index": index} | self._call(name)]}
            case ToolCallArguments(index, more):
                return {"tool_calls": [{"index": index, "function": {"arguments": more}}]}
        return None

    def _chunk(
        self, index: int, delta: dict[str, Any], choice: ChoiceState | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        """A chunk, with the tokens of its choice that were not in one yet."""
        tokens: list[ScoredToken] = []
        if choice is not None:
            tokens, choice.unsent = choice.unsent, []
        logprobs = chat_logprobs(tokens, self._plan.engine) if self._body.logprobs and tokens else None
        fields = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {"choices": [fields | self._token_ids(tokens)]}
