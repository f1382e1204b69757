"""The plan of a chat: its prompt, which calls its next message must or may have, and how long it may become.

    ChatRequest ──▶ ChatPlan ──▶ a MessageStream for each choice

Every API that has chats turns its own requests into a `ChatRequest` first, so that each field is checked once, here and
in `plan`.
"""

from __future__ import annotations

from dataclasses import replace

from headway.base.dataclass import dataclass
from headway.base.text import short_repr
from headway.program.constraints.grammar import Grammar
from headway.server.api.checks import RequestChecks
from headway.server.api.plan import RequestPlan, check_size, check_tools, grammar_of, plan_request
from headway.server.api.request_schema import ChatRequest, CustomFunction, NamedTool
from headway.server.chats.fields import modern_request, own_template, template_variables
from headway.server.chats.message_stream import ToolPolicy
from headway.server.chats.messages import ChatPrompt, read_chat_prompt, texts_of
from headway.server.errors import bad_request
from headway.server.keys import Tenant
from headway.server.models import ModelLease
from headway.server.serving import Serving
from headway.server.settings import ServerSettings


@dataclass(frozen=True, eq=False)
class ChatPlan:
    """A chat that passed all checks."""

    request: RequestPlan
    prompt: ChatPrompt
    policy: ToolPolicy
    later_tokens: int = 0  # of what tools return while it is generated, at most

    @property
    def tokens(self) -> int:
        """The most tokens that are computed for it."""
        own = len(self.prompt.ids) + self.request.width * self.policy.max_tokens
        return max(own, min(own + self.later_tokens, self.request.engine.config.max_positions))


async def plan_chat(body: ChatRequest, serving: Serving, tenant: Tenant, lease: ModelLease) -> ChatPlan:
    """The plan of a request that passes all checks. Called with a place in the queue."""
    check = RequestChecks(serving, lease.engine)
    engine, threads = check.engine, check.threads
    body = modern_request(body)
    if body.best_of not in (None, 1) and not body.use_beam_search:
        raise bad_request(
            f"best_of is {body.best_of}; chats have it with use_beam_search: set that, or use n", "best_of"
        )
    grammar = await threads.run(_response_format, body, check.settings)
    policy = await threads.run(_tool_policy, body, check.settings)
    plan = await plan_request(body, serving, tenant, lease, top_logprobs=_top_logprobs(body), grammar=grammar)
    prompt = await threads.run(read_prompt, body, check)
    await plan.prepare(await threads.run(_argument_grammars, prompt, policy, plan.grammar is not None), "tools")
    max_tokens = check.in_range("max_tokens", _max_tokens(body), 1, engine.config.max_positions)
    prompt = replace(prompt, ids=check.truncated(prompt.ids, body.truncate_prompt_tokens, max_tokens))
    limit = check.max_new_tokens(len(prompt.ids), max_tokens, plan.min_tokens, "messages")
    if max_tokens is None and (default := engine.generation_defaults.max_new_tokens) is not None:
        limit = min(limit, default)
    check.prompt_logprobs("prompt_logprobs", len(prompt.ids), plan.prompt_logprobs)
    check.response_logprobs(body.stream, plan.count * limit, plan.top_logprobs, "top_logprobs")
    return ChatPlan(plan, prompt, replace(policy, max_tokens=limit, reasoning_tokens=_reasoning_tokens(body)))


def _reasoning_tokens(body: ChatRequest) -> int | None:
    """How many tokens the reasoning may have."""
    budget = body.thinking_token_budget
    if budget is not None and budget < 0:
        raise bad_request(
            f"thinking_token_budget is {budget}; it must be an integer of at least 0",
            "thinking_token_budget",
            "out_of_range",
        )
    if budget is not None and body.use_beam_search:
        raise bad_request(
            "thinking_token_budget cannot be combined with use_beam_search; remove one of them",
            "thinking_token_budget",
            "unsupported",
        )
    return budget


def read_prompt(body: ChatRequest, check: RequestChecks) -> ChatPrompt:
    """The prompt of a request, in a thread."""
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
    template = own_template(body.chat_template, check.engine, check.settings)
    return read_chat_prompt(
        body.messages,
        tools,
        check.engine,
        cue=body.add_generation_prompt is not False,
        continue_last=bool(body.continue_final_message),
        template=template,
        variables=template_variables(
            body.chat_template_kwargs, template, effort=body.reasoning_effort, verbosity=body.verbosity
        ),
    )


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs requires logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(f"max_tokens is {old} and max_completion_tokens is {new}; pass one of them", "max_tokens")
    return old if new is None else new


def _tool_policy(body: ChatRequest, settings: ServerSettings) -> ToolPolicy:
    """Which tool calls the message must or may have."""
    names = [tool.function.name for tool in body.tools or ()]
    strict = frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)
    custom = _custom_tools(body, settings)
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return ToolPolicy(None, strict, body.parallel_tool_calls is False, custom=custom)
    name = choice.function.name if isinstance(choice, NamedTool) else ""
    if not names:
        raise bad_request("tool_choice requires a call, and there are no tools; pass some in tools", "tool_choice")
    if name and name not in names:
        raise bad_request(f"tool_choice names {short_repr(name)}; the tools are {', '.join(names)}", "tool_choice")
    return ToolPolicy(name, strict, True, custom=custom)


def _custom_tools(body: ChatRequest, settings: ServerSettings) -> dict[str, Grammar | None]:
    """The custom tools of a request, and the Lark grammars of those that have one."""
    grammars: dict[str, Grammar | None] = {}
    for i, tool in enumerate(body.tools or ()):
        if not isinstance(function := tool.function, CustomFunction):
            continue
        grammars[function.name], lark = None, function.lark
        if lark is not None:
            check_size(lark, f"tools[{i}]", settings)
            grammars[function.name] = grammar_of(lambda text=lark: Grammar.lark(text), f"tools[{i}]")
    return grammars


def _response_format(body: ChatRequest, settings: ServerSettings) -> Grammar | None:
    format = body.response_format
    if format is None:
        return None
    if format.type == "text":
        if format.schema_ is not None:
            raise bad_request("response_format of type text has a schema; remove it", "response_format.schema")
        return None
    if format.json_schema is not None and format.schema_ is not None:
        raise bad_request("response_format has both schema and json_schema; pass one of them", "response_format.schema")
    if format.json_schema is None and format.schema_ is None and format.type == "json_schema":
        raise bad_request("response_format of type json_schema has no json_schema; pass one", "response_format")
    where, schema = "response_format.schema", format.schema_
    if format.type == "json_schema" and format.json_schema is not None:
        where, schema = "response_format.json_schema.schema", format.json_schema.schema_
    if schema is None:
        return Grammar.json_object()
    check_size(schema, where, settings)
    return grammar_of(lambda: Grammar.json_schema(schema), where)


def _argument_grammars(prompt: ChatPrompt, policy: ToolPolicy, has_format: bool) -> list[Grammar]:
    """The grammars that calls will be constrained by; in a message with a format, every call is."""
    names = prompt.tools.names
    if policy.must_call is None and has_format and prompt.form is not None:
        strict = [name for name in names if name in policy.strict]
        of_calls = [_call_grammar(prompt, policy, name) for name in strict]
        return list(dict.fromkeys([*of_calls, Grammar.json_object(), *_name_choice(prompt)]))
    if policy.must_call is None:
        names = tuple(name for name in names if name in policy.strict)
    elif policy.must_call:
        names = (policy.must_call,)
    grammars = [_call_grammar(prompt, policy, name) for name in names]
    return [*grammars, *(_name_choice(prompt) if policy.must_call == "" else ())]


def _call_grammar(prompt: ChatPrompt, policy: ToolPolicy, name: str) -> Grammar:
    """The grammar of a tool's arguments, or of its text."""
    own = policy.custom.get(name)
    return own or grammar_of(lambda: prompt.tools.get(name).arguments, f"tools ({name})")


def _name_choice(prompt: ChatPrompt) -> list[Grammar]:
    """The grammar of a choice among the tools, if there is one."""
    names, form = prompt.tools.names, prompt.form
    return [Grammar.choices(name + form.border for name in names)] if form is not None and len(names) > 1 else []
