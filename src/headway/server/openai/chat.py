"""`POST /v1/chat/completions`: generates the next message of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.base.dataclass import dataclass
from headway.program.context import Context
from headway.server.api.beams import search
from headway.server.api.parsing import JsonRoute
from headway.server.api.prompts import Prompt, score_prompt, scored_tokens
from headway.server.api.request_schema import ChatRequest
from headway.server.api.respond import DONE, TokenUsage, check_stream_options, respond
from headway.server.api.response_schema import ChatCompletion, whole_or_stream
from headway.server.api.streaming import Put, forks, run_all
from headway.server.api.tokens import ScoredToken, chat_logprobs, prompt_logprobs
from headway.server.chats.custom_input import CustomInput
from headway.server.chats.message_stream import MessageDelta, MessageStream, call_id
from headway.server.chats.plan import ChatPlan, plan_chat
from headway.server.errors import bad_request
from headway.server.models import requested_model
from headway.server.serving import AdmittedRequest, Serving
from headway.text.replies.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart

router = APIRouter(route_class=JsonRoute)


@router.post("/chat/completions", summary="Generate the next message", responses=whole_or_stream(ChatCompletion))
@router.post(
    "/v1/chat/completions", summary="Generate the next message of a chat", responses=whole_or_stream(ChatCompletion)
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The assistant's next message, whole or as a stream of server-sent events."""
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    lease = await requested_model(request, body.model)
    check_stream_options(body)
    with serving.queue_slot(tenant):
        plan = await plan_chat(body, serving, tenant, lease)
    return await respond(serving, request, body, ChatJob(body, plan), tokens=plan.tokens, lease=lease)


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
    inputs: dict[int, CustomInput] = field(default_factory=dict)  # of calls of custom tools
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: str | None = None
    begun: bool = False  # whether its first chunk was sent
    unsent: list[ScoredToken] = field(default_factory=list)  # tokens for the next chunk


class ChatJob:
    """The generation of one request, and its response."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    last_event = DONE

    def __init__(self, body: ChatRequest, chat: ChatPlan) -> None:
        self._body, self._plan, self._prompt, self._policy = body, chat.request, chat.prompt, chat.policy
        self._choices = [ChoiceState() for _ in range(self._plan.count)]
        self._scores: list[Any] | None = None
        self.usage = TokenUsage(prompt=len(self._prompt.ids))

    async def run(self, put: Put[ChoiceDelta]) -> None:
        async with self._plan.context() as home:
            await self._fill_prompt(home)
            if self._plan.beams is not None:
                await self._search(home, put)
                self.usage.cached += home.cached_tokens
                return
            async with forks(home, self._plan.count, self._plan.adapters) as contexts:
                await run_all(self._generate(one, i, put) for i, one in enumerate(contexts))
            self.usage.add_context(home)

    async def _search(self, home: Context, put: Put[ChoiceDelta]) -> None:
        """The choices of a beam search, best first."""
        streams = [MessageStream(self._plan, self._prompt, self._policy, home, i) for i in range(self._plan.count)]
        lead, grammar = streams[0].first_items()
        ids = self._plan.engine.tokenizer.encode(lead, special=True) if lead else []
        home.fill(ids)
        before, left = home.text_before, self._policy.max_tokens - len(ids)
        if left < 1:
            raise bad_request(
                f"max_tokens is {self._policy.max_tokens}, and {len(ids)} tokens introduce the content; use more",
                "max_tokens",
            )
        for stream, one in zip(streams, await search(self._plan, home, grammar, left), strict=False):
            await put(ChoiceDelta(stream.number, await stream.found(lead, one, before)))
            self.usage.completion += stream.count

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
                choice.calls[index] = self._call(index, name, choice)
                choice.arguments[index] = []
            case ToolCallArguments(index, delta):
                choice.arguments[index].append(_decoded(index, delta, choice))

    def _call(self, index: int, name: str, choice: ChoiceState) -> dict[str, Any]:
        id = call_id(self._prompt.format)
        if name not in self._policy.custom:
            return {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        choice.inputs[index] = CustomInput()
        return {"id": id, "type": "custom", "custom": {"name": name, "input": ""}}

    def response(self) -> dict[str, Any]:
        finished = [choice for choice in self._choices if choice.finish is not None]  # a search may find fewer
        result: dict[str, Any] = {"choices": [self._choice(i, choice) for i, choice in enumerate(finished)]}
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
            calls = [_whole_call(call, "".join(choice.arguments[i])) for i, call in choice.calls.items()]
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
            if (fields := self._delta_fields(part, choice)) is not None:
                yield self._chunk(delta.index, fields, choice)
        if delta.message.finish is not None:
            yield self._chunk(delta.index, {}, choice, self._finish_reason(delta.message.finish))

    def _delta_fields(self, part: Part, choice: ChoiceState) -> dict[str, Any] | None:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCallStart(index, name) if self._legacy:
                return {"function_call": self._call(index, name, choice)["function"]}
            case ToolCallArguments(_, more) if self._legacy:
                return {"function_call": {"arguments": more}}
            case ToolCallStart(index, name):
                return {"tool_calls": [{"index": index} | self._call(index, name, choice)]}
            case ToolCallArguments(index, more) if index in choice.inputs:
                text = _decoded(index, more, choice)
                return {"tool_calls": [{"index": index, "custom": {"input": text}}]} if text else None
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


def _decoded(index: int, delta: str, choice: ChoiceState) -> str:
    """What a piece of a call's arguments adds: a custom tool gets a text, not JSON."""
    return delta if index not in choice.inputs else choice.inputs[index].push(delta)


def _whole_call(call: dict[str, Any], arguments: str) -> dict[str, Any]:
    kind, what = ("function", "arguments") if call["type"] == "function" else ("custom", "input")
    return call | {kind: call[kind] | {what: arguments}}
