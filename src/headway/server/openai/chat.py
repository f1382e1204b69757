"""`POST /v1/chat/completions`: the next message of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.program.constraints.grammar import Grammar
from headway.program.context import Context
from headway.server.auth import Tenant
from headway.server.errors import bad_request
from headway.server.openai.checks import Check
from headway.server.openai.message_stream import Manner, Said, Speech, call_id
from headway.server.openai.messages import Talk, read_talk, texts_of
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.plan import Plan, check_size, check_tools, grammar_of, plan
from headway.server.openai.prompts import Prompt, score, spelled
from headway.server.openai.request_schema import ChatRequest, NamedTool
from headway.server.openai.respond import Usage, check_model, check_stream, respond
from headway.server.openai.response_schema import ChatCompletion, streams
from headway.server.openai.streaming import Put, copies, together
from headway.server.openai.tokens import Token, chat_logprobs, prompt_logprobs
from headway.server.serving import Serving, Ticket
from headway.server.settings import Settings
from headway.text.replies.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="The next message of a chat", responses=streams(ChatCompletion))
async def chat_completions(asked: ChatRequest, request: Request) -> Response:
    """The assistant's next message, whole or as a stream of events."""
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    check_model(serving, asked.model)
    check_stream(asked)
    with serving.counted(tenant):
        job = await _settled(asked, serving, tenant)
    return await respond(serving, request, asked, job, tokens=job.tokens)


async def _settled(asked: ChatRequest, serving: Serving, tenant: Tenant) -> Chat:
    """A request that can be answered, with its prompt."""
    check = Check(serving)
    engine, threads = check.engine, check.threads
    manner, grammar = _manner(asked), await threads.run(_response_format, asked, check.settings)
    _check_together(asked, manner)
    how = await plan(asked, serving, tenant, top=_top(asked), grammar=grammar)
    talk = await threads.run(_read, asked, check)
    await how.prepare(await threads.run(_argument_grammars, talk, manner), "tools")
    most = check.between("max_tokens", _max_tokens(asked), 1, engine.config.max_positions)
    limit = check.length(len(talk.ids), most, how.min_tokens, "messages")
    if most is None and (usual := engine.generation_defaults.max_new_tokens) is not None:
        limit = min(limit, usual)
    check.prompt_scores("prompt_logprobs", len(talk.ids), how.prompt_top)
    check.answer_scores(asked.stream, how.count * limit, how.top)
    return Chat(asked, how, talk, Manner(manner.must_call, manner.strict, manner.one_call, limit))


def _read(asked: ChatRequest, check: Check) -> Talk:
    shown = [] if asked.tool_choice == "none" else asked.tools or []
    check_tools(shown, check.settings)
    check.text(texts_of(asked.messages), "messages")
    return read_talk(asked.messages, shown, check.engine)


def _top(asked: ChatRequest) -> int | None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise bad_request("top_logprobs was given without logprobs; give logprobs: true too", "top_logprobs")
    return (asked.top_logprobs or 0) if asked.logprobs else None


def _max_tokens(asked: ChatRequest) -> int | None:
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(f"max_tokens is {old} and max_completion_tokens is {new}; give one", "max_tokens")
    return old if new is None else new


def _manner(asked: ChatRequest) -> Manner:
    """Which calls the message must or may have."""
    names = [tool.function.name for tool in asked.tools or ()]
    strict = frozenset(tool.function.name for tool in asked.tools or () if tool.function.strict)
    choice = asked.tool_choice
    if choice in (None, "none", "auto"):
        return Manner(None, strict, asked.parallel_tool_calls is False)
    name = choice.function.name if isinstance(choice, NamedTool) else ""
    if not names:
        raise bad_request("tool_choice asks for a call and there are no tools; give some in tools", "tool_choice")
    if name and name not in names:
        raise bad_request(f"tool_choice names {name!r:.80}; the tools are {', '.join(names)}", "tool_choice")
    return Manner(name, strict, True)


def _check_together(asked: ChatRequest, manner: Manner) -> None:
    """Raise where a form was asked for and calls were too: a text has one of them."""
    shaped = asked.structured_outputs is not None or (
        asked.response_format is not None and asked.response_format.type != "text"
    )
    if shaped and asked.tools and asked.tool_choice != "none":
        field = "response_format" if asked.structured_outputs is None else "structured_outputs"
        raise bad_request(
            f"{field} and tools were both given, and a message cannot be free to call and have a form; leave one out, "
            "or give tool_choice: none",
            field,
            "unsupported",
        )


def _response_format(asked: ChatRequest, settings: Settings) -> Grammar | None:
    form = asked.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar.json_object()
    if form.json_schema is None:
        raise bad_request("response_format is json_schema and has none; give its json_schema", "response_format")
    where, schema = "response_format.json_schema.schema", form.json_schema.schema_
    if schema is None:
        return Grammar.json_object()
    check_size(schema, where, settings)
    return grammar_of(lambda: Grammar.json_schema(schema), where)


def _argument_grammars(talk: Talk, manner: Manner) -> list[Grammar]:
    """The schemas of arguments that will be followed."""
    names = talk.tools.names
    if manner.must_call is None:
        names = tuple(name for name in names if name in manner.strict)
    elif manner.must_call:
        names = (manner.must_call,)
    found = [grammar_of(lambda tool=talk.tools.get(name): tool.arguments, f"tools ({name})") for name in names]
    if manner.must_call == "" and len(names) > 1 and talk.form is not None:
        border = talk.form.border
        found.append(Grammar.choices(name + border for name in names))
    return found


@dataclass(frozen=True)
class Delta:
    """What has come of a choice."""

    index: int
    said: Said


@dataclass
class Choice:
    """One choice, as far as it has come."""

    contents: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    begun: bool = False  # its first chunk was sent
    waiting: list[Token] = field(default_factory=list)  # for the next chunk


class Chat:
    """The work of one request, and its answer."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, how: Plan, talk: Talk, manner: Manner) -> None:
        self._asked, self._plan, self._talk, self._manner = asked, how, talk, manner
        self._choices = [Choice() for _ in range(how.count)]
        self._scores: list[Any] | None = None
        self.usage = Usage(prompt=len(talk.ids))
        self.tokens = len(talk.ids) + how.count * manner.max_tokens  # that may be computed

    async def work(self, put: Put[Delta]) -> None:
        async with self._plan.context() as home:
            await self._open(home)
            async with copies(home, self._plan.count) as contexts:
                await together(self._speak(one, i, put) for i, one in enumerate(contexts))
            self.usage.cached += home.cached_tokens

    async def _open(self, home: Context) -> None:
        k, ids = self._plan.prompt_top, self._talk.ids
        if k is None:
            home.fill(ids)
            return
        scores, engine = await score(home, ids, k), self._plan.engine
        prompt = Prompt(ids, "", False)
        self._scores = await self._plan.writing.run(lambda: prompt_logprobs(spelled(prompt, scores, k, engine), engine))

    async def _speak(self, context: Context, number: int, put: Put[Delta]) -> None:
        speech = Speech(self._plan, self._talk, self._manner, context, number)
        async for said in speech.said():
            if said.parts or said.tokens or said.new or said.finish:
                await put(Delta(number, said))
        self.usage.completion += speech.count

    # -- the answer ------------------------------------------------------------------------------------------------

    def take(self, delta: Delta, ticket: Ticket) -> None:
        said, choice = delta.said, self._choices[delta.index]
        if said.new > 0:
            ticket.tokens(said.new, choice=delta.index)
        if said.finish is not None:
            ticket.finish(said.finish)
            choice.finish = said.finish
        if self._asked.stream:
            return
        choice.tokens += said.tokens
        for part in said.parts:
            self._keep(part, choice)

    def _keep(self, part: Part, choice: Choice) -> None:
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
        return {"id": call_id(self._talk.format), "type": "function", "function": {"name": name, "arguments": ""}}

    def answer(self) -> dict[str, Any]:
        whole = {"choices": [self._choice(i, one) for i, one in enumerate(self._choices)]}
        return whole if self._scores is None else whole | {"prompt_logprobs": self._scores}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        content = "".join(choice.contents)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasonings:
            message["reasoning_content"] = "".join(choice.reasonings)
        if choice.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": "".join(choice.arguments[i])}}
                for i, call in choice.calls.items()
            ]
        logprobs = chat_logprobs(choice.tokens, self._plan.engine) if self._asked.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def weight(self, deltas: Iterable[Delta]) -> int:
        if not self._asked.logprobs or self._plan.top is None:
            return 0
        return sum(len(delta.said.tokens) for delta in deltas) * (self._plan.top + 1)

    @property
    def whole_weight(self) -> int:
        own = sum(len(choice.tokens) for choice in self._choices) * ((self._plan.top or 0) + 1)
        prompt = 0 if self._plan.prompt_top is None else self.usage.prompt * (self._plan.prompt_top + 1)
        return own + prompt

    def chunks(self, delta: Delta) -> Iterable[dict[str, Any]]:
        choice = self._choices[delta.index]
        choice.waiting += delta.said.tokens
        if not choice.begun:
            choice.begun = True
            yield self._chunk(delta.index, {"role": "assistant", "content": "", "refusal": None})
        for part in delta.said.parts:
            if (shown := self._shown(part)) is not None:
                yield self._chunk(delta.index, shown, self._taken(choice))
        if delta.said.finish is not None:
            yield self._chunk(delta.index, {}, self._taken(choice), delta.said.finish)

    def _shown(self, part: Part) -> dict[str, Any] | None:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCallStart(index, name):
                return {"tool_calls": [{"index": index} | self._call(name)]}
            case ToolCallArguments(index, more):
                return {"tool_calls": [{"index": index, "function": {"arguments": more}}]}
        return None

    def _taken(self, choice: Choice) -> dict[str, Any] | None:
        """The log-probabilities of tokens that no chunk had yet."""
        tokens, choice.waiting = choice.waiting, []
        return chat_logprobs(tokens, self._plan.engine) if self._asked.logprobs and tokens else None

    @staticmethod
    def _chunk(
        index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]}
