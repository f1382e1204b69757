"""A message as output items of a response, and as the events of its stream in OpenAI's order.

response.created, response.in_progress
for each item:  output_item.added
                content_part.added, its text or reasoning in deltas, …done, content_part.done
                or the arguments of a call in deltas, function_call_arguments.done
                or the text for a custom tool in deltas, custom_tool_call_input.done
                or mcp_call.in_progress, its arguments in deltas, …done, and mcp_call.completed or .failed
                or mcp_list_tools.in_progress, .completed
                or nothing: a request for an approval is whole when it comes
                output_item.done
response.completed, or response.incomplete, or error and response.failed
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any

from headway.base.dataclass import dataclass
from headway.program.engine import Engine
from headway.server.api.streaming import EVENTS, json_bytes, json_bytes_in_pieces
from headway.server.api.tokens import ScoredToken, chat_logprobs
from headway.server.chats.custom_input import CustomInput
from headway.server.chats.message_job import MessageEnd, MessageUsage
from headway.server.chats.message_stream import MessageDelta, call_id
from headway.server.errors import ApiError
from headway.server.mcp.messages import McpTool
from headway.server.responses.request_schema import ResponseRequest, conversation_id
from headway.server.settings import owned_by
from headway.text.replies.parts import (
    BadToolCall,
    Content,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # the part that an item's text is
NOT_HERE = (  # fields of responses of OpenAI that have no meaning here; clients look for them
    *("access_programs", "image", "input_transformations", "moderation", "prompt"),
    *("prompt_cache_diagnostics", "prompt_cache_options", "tool_usage"),
)
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
PIECES = {  # the events of a call's text
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
    "mcp_call": "response.mcp_call_arguments",
}
APPROVAL = "mcp_approval_request"
SECRET_FIELDS = {"headers", "authorization"}  # of an MCP server in a request: never sent back, never stored
TOOL_LIMIT = "tool_limit"  # finish reason: the server makes no more calls for this response


def new_id(prefix: str, replica: str = "") -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{owned_by(replica, secrets.token_hex(24))}"


def mcp_item_id(response_id: str, number: int) -> str:
    """The id of the item of a response's MCP call with this number."""
    return "mcp_" + hashlib.sha256(f"{response_id} {number}".encode()).hexdigest()[:48]


@dataclass(frozen=True)
class McpResult:
    """How an MCP call of a response ended: with an output, or with an error as OpenAI has it."""

    number: int  # of the call, in the response
    output: str | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RoundDelta(MessageDelta):
    """Results of MCP calls, and the tokens of the prompt that follows them."""

    results: Sequence[McpResult] = ()
    prompt: int = 0


@dataclass(frozen=True)
class ApprovedCall:
    """An MCP call of an earlier response that the client has approved since."""

    request_id: str
    label: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ResponseTools:
    """Tools whose calls are items of their own kinds."""

    custom: Collection[str] = ()
    mcp: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # label and own name, by the name for the model
    asking: Collection[str] = ()  # those of `mcp` whose calls need an approval
    approved: Sequence[ApprovedCall] = ()  # that this response begins with
    lists: Sequence[tuple[str, Sequence[McpTool]]] = ()  # the tools of each MCP server


@dataclass
class OutputItem:
    """One item of the output so far."""

    type: str  # of the types of items
    id: str
    index: int
    name: str = ""  # of the function
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    status: str = "in_progress"
    label: str = ""  # of the MCP server
    approval: str | None = None  # the id of the request that was approved
    input: CustomInput | None = None  # decodes a custom tool's text
    result: McpResult | None = None
    tools: Sequence[McpTool] = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ResponseWriter:
    """Writes one response. It is the `MessageFormat` of this API."""

    media_type = EVENTS

    def __init__(
        self,
        body: ResponseRequest,
        engine: Engine,
        *,
        model: str,
        format: str | None,
        replica: str = "",
        tools: ResponseTools = ResponseTools(),
    ) -> None:
        """`format` is how the model marks tool calls; `replica` is the one that computes it."""
        self.id = new_id("resp", replica)
        self._tools = tools
        self._mcp_calls: list[OutputItem] = []
        self._limited = False  # it ended because no more tools may be called
        self._body, self._engine, self._model, self._format = body, engine, model, format
        self._created = int(time.time())
        self._status = "queued" if body.background else "in_progress"
        self._items: list[OutputItem] = []
        self._usage: MessageUsage | None = None
        self._error: dict[str, str] | None = None
        self._number = 0  # of the next event
        self._ranked = "message.output_text.logprobs" in (body.include or ())

    # -- the response ----------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        return self._status

    def stored(self) -> dict[str, Any]:
        """The response without log-probabilities, as it is kept."""
        kept, self._ranked = self._ranked, False
        try:
            return self.whole()
        finally:
            self._ranked = kept

    def whole(self) -> dict[str, Any]:
        body, reasoning, text = self._body, self._body.reasoning, self._body.text
        format = None if text is None or text.format is None else text.format
        ended = self._status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": bool(body.background),
            "error": self._error,
            "incomplete_details": self._incomplete_details(),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [self._item(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "conversation": None if body.conversation is None else {"id": conversation_id(body)},
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if format is None else format.model_dump(by_alias=True)},
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": [tool.model_dump(exclude=SECRET_FIELDS) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": _usage(self._usage) if ended and self._usage is not None else None,
            "user": body.user,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            **dict.fromkeys(NOT_HERE),
        }

    def _incomplete_details(self) -> dict[str, str] | None:
        if self._status != "incomplete":
            return None
        return {"reason": "max_tool_calls" if self._limited else "max_output_tokens"}

    def _item(self, item: OutputItem) -> dict[str, Any]:
        same = {"id": item.id, "type": item.type, "status": item.status}
        match item.type:
            case "function_call":
                return same | {"call_id": item.call_id, "name": item.name, "arguments": item.text}
            case "custom_tool_call":
                return same | {"call_id": item.call_id, "name": item.name, "input": item.text}
            case "mcp_call":
                result = item.result or McpResult(0)
                about = {"server_label": item.label, "name": item.name, "arguments": item.text}
                about |= {"output": result.output, "error": result.error}
                return same | about | {"approval_request_id": item.approval}
            case "mcp_approval_request":
                del same["status"]
                return same | {"server_label": item.label, "name": item.name, "arguments": item.text}
            case "mcp_list_tools":
                del same["status"]
                return same | {
                    "server_label": item.label,
                    "tools": [_listed(tool) for tool in item.tools],
                    "error": None,
                }
            case "reasoning":
                return same | {"summary": [], "content": [self._part(item)] if item.pieces else []}
        return same | {"role": "assistant", "content": [self._part(item)] if item.pieces else []}

    def _part(self, item: OutputItem) -> dict[str, Any]:
        part = {"type": PARTS[item.type], "text": item.text}
        if item.type == "reasoning":
            return part
        return part | {"annotations": [], "logprobs": self._logprobs(item.tokens)}

    def _logprobs(self, tokens: list[ScoredToken]) -> list[Any]:
        return chat_logprobs(tokens, self._engine)["content"] if self._ranked else []

    # -- the stream ------------------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        created = self._response_event("response.created")
        self._status = "in_progress"
        created += self._response_event("response.in_progress")
        created += b"".join([self._list_tools(label, tools) for label, tools in self._tools.lists])
        return created + b"".join([self._start_approved(call) for call in self._tools.approved])

    def _list_tools(self, label: str, tools: Sequence[McpTool]) -> bytes:
        item = OutputItem("mcp_list_tools", new_id("mcpl"), len(self._items), label=label)
        self._items.append(item)
        written = self._event("response.output_item.added", output_index=item.index, item=self._item(item))
        item.status, item.tools = "completed", tools
        for step in ("in_progress", "completed"):
            written += self._event(f"response.mcp_list_tools.{step}", item)
        return written + self._event("response.output_item.done", output_index=item.index, item=self._item(item))

    def add(self, delta: MessageDelta) -> bytes:
        if isinstance(delta, RoundDelta):
            return b"".join(self._end_mcp_call(result) for result in delta.results)
        tokens = list(delta.tokens)
        pieces = []
        for part in delta.parts:
            pieces.append(self._add_part(part, tokens if isinstance(part, Content) else []))
            if isinstance(part, Content):
                tokens = []
        if tokens and self._open is not None and self._open.type == "message":
            self._open.tokens += tokens
        return b"".join(pieces)

    def _add_part(self, part: Part, tokens: list[ScoredToken]) -> bytes:
        match part:
            case Content(text):
                return self._add_text("message", text, tokens)
            case Reasoning(text):
                return self._add_text("reasoning", text, [])
            case ToolCallStart(_, name):
                return self._close() + self._start_call(name)
            case ToolCallArguments(_, more) if self._open is not None:
                return self._add_to_call(self._open, more)
            case ToolCallEnd() if self._open is not None and self._open.type == "mcp_call":
                self._open.status, item = "calling", self._open
                return self._event("response.mcp_call_arguments.done", item, arguments=item.text)
            case ToolCallEnd():
                return self._close()
            case BadToolCall(index=int()):
                return self._close("incomplete")
        return b""

    def _start_call(self, name: str) -> bytes:
        if name in self._tools.mcp:
            label, own = self._tools.mcp[name]
            if name not in self._tools.asking:
                return self._start_mcp_call(OutputItem("mcp_call", "", 0, own, label=label))
            self._items.append(OutputItem(APPROVAL, new_id("mcpr"), len(self._items), own, label=label))
            return b""
        if name not in self._tools.custom:
            return self._start("function_call", name=name)
        written = self._start("custom_tool_call", name=name)
        self._items[-1].input = CustomInput()
        return written

    def _start_mcp_call(self, item: OutputItem) -> bytes:
        item.id, item.index = mcp_item_id(self.id, len(self._mcp_calls)), len(self._items)
        self._items.append(item)
        self._mcp_calls.append(item)
        added = self._event("response.output_item.added", output_index=item.index, item=self._item(item))
        return added + self._event("response.mcp_call.in_progress", item)

    def _start_approved(self, call: ApprovedCall) -> bytes:
        item = OutputItem("mcp_call", "", 0, call.name, label=call.label, approval=call.request_id)
        written, item.pieces, item.status = self._start_mcp_call(item), [call.arguments], "calling"
        return written + self._event("response.mcp_call_arguments.done", item, arguments=item.text)

    def _add_to_call(self, item: OutputItem, more: str) -> bytes:
        text = more if item.input is None else item.input.push(more)
        if not text:
            return b""
        item.pieces.append(text)
        if item.type == APPROVAL:
            return b""
        return self._event(f"{PIECES[item.type]}.delta", item, delta=text)

    def _end_mcp_call(self, result: McpResult) -> bytes:
        item = self._mcp_calls[result.number]
        item.result, item.status = result, "completed" if result.error is None else "failed"
        written = self._event(f"response.mcp_call.{item.status}", item)
        return written + self._event("response.output_item.done", output_index=item.index, item=self._item(item))

    def _add_text(self, type: str, text: str, tokens: list[ScoredToken]) -> bytes:
        written = b""
        item = self._open
        if item is None or item.type != type:
            written = self._close() + self._start(type)
            item = self._items[-1]
            part = {"type": PARTS[type], "text": ""}
            part |= {} if type == "reasoning" else {"annotations": [], "logprobs": []}
            written += self._event("response.content_part.added", item, content_index=0, part=part)
        item.pieces.append(text)
        item.tokens += tokens
        if type == "reasoning":
            return written + self._event("response.reasoning_text.delta", item, content_index=0, delta=text)
        ranked = self._logprobs(tokens)
        return written + self._event("response.output_text.delta", item, content_index=0, delta=text, logprobs=ranked)

    def end(self, end: MessageEnd) -> bytes:
        self._limited = end.finish == TOOL_LIMIT
        cut = end.finish == "length" or self._limited
        written = self._close("incomplete" if cut else "completed")
        self._status, self._usage = "incomplete" if cut else "completed", end.usage
        return written + self._response_event(f"response.{self._status}")

    def failed(self, error: ApiError) -> bytes:
        written = self._event("error", code=error.code, message=error.message, param=error.param)
        self.fail(error)
        return written + self._response_event("response.failed")

    def fail(self, error: ApiError) -> None:
        """The response failed."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error" if error.status >= 500 else ""
        self._status, self._error = "failed", {"code": code or "invalid_prompt", "message": error.message}
        self._break_off()

    def cancel(self) -> None:
        """The response was cancelled."""
        self._status = "cancelled"
        self._break_off()

    def _break_off(self) -> None:
        self._close("incomplete")
        for item in self._mcp_calls:
            item.status = "incomplete" if item.status == "calling" else item.status

    # -- items -----------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> OutputItem | None:
        """The item that is being written."""
        return self._items[-1] if self._items and self._items[-1].status == "in_progress" else None

    def _start(self, type: str, *, name: str = "") -> bytes:
        own = call_id(self._format) if type in PIECES else ""
        item = OutputItem(type, new_id(PREFIXES[type]), len(self._items), name, own)
        self._items.append(item)
        return self._event("response.output_item.added", output_index=item.index, item=self._item(item))

    def _close(self, status: str = "completed") -> bytes:
        """The last events of the item that is being written."""
        item = self._open
        if item is None:
            return b""
        item.status = status
        if item.type == APPROVAL:
            return self._close_approval(item)
        if not self._body.stream:
            return b""
        if item.type == "function_call":
            written = self._event("response.function_call_arguments.done", item, arguments=item.text, name=item.name)
        elif item.type == "custom_tool_call":
            written = self._event("response.custom_tool_call_input.done", item, input=item.text)
        elif item.type == "mcp_call":
            written = self._event("response.mcp_call_arguments.done", item, arguments=item.text)
            written += self._event("response.mcp_call.failed", item)
        else:
            kind = "reasoning_text" if item.type == "reasoning" else "output_text"
            ranked = {} if item.type == "reasoning" else {"logprobs": self._logprobs(item.tokens)}
            written = self._event(f"response.{kind}.done", item, content_index=0, text=item.text, **ranked)
            written += self._event("response.content_part.done", item, content_index=0, part=self._part(item))
        return written + self._event("response.output_item.done", output_index=item.index, item=self._item(item))

    def _close_approval(self, item: OutputItem) -> bytes:
        """A request for an approval, whole; one that was cut off is none."""
        if item.status != "completed":
            self._items.pop()
            return b""
        events = ("response.output_item.added", "response.output_item.done")
        return b"".join(self._event(event, output_index=item.index, item=self._item(item)) for event in events)

    # -- events ----------------------------------------------------------------------------------------------------

    def _response_event(self, type: str) -> bytes:
        return self._event(type, response=self.whole()) if self._body.stream else b""

    def _event(self, type: str, about: OutputItem | None = None, /, **fields: Any) -> bytes:
        place = {} if about is None else {"item_id": about.id, "output_index": about.index}
        data = {"type": type, "sequence_number": self._number, **place, **fields}
        self._number += 1
        if not self._body.stream:
            return b""
        write = json_bytes_in_pieces if self._ranked else json_bytes
        return f"event: {type}\ndata: ".encode() + write(data) + b"\n\n"


def _usage(usage: MessageUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _listed(tool: McpTool) -> dict[str, Any]:
    """A tool as a list of tools has it."""
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.schema,
        "annotations": tool.annotations,
    }


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
