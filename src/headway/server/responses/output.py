"""A message as output items of a response, and as the events of its stream in OpenAI's order.

response.created, response.in_progress
for each item:  output_item.added
                content_part.added, its text or reasoning in deltas, …done, content_part.done
                or the arguments of a call in deltas, function_call_arguments.done
                output_item.done
response.completed, or response.incomplete, or error and response.failed
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from headway.program.engine import Engine
from headway.server.errors import ApiError
from headway.server.message_job import MessageEnd, MessageUsage
from headway.server.openai.message_stream import MessageDelta, call_id
from headway.server.openai.streaming import EVENTS, json_bytes, json_bytes_in_pieces
from headway.server.openai.tokens import ScoredToken, chat_logprobs
from headway.server.responses.request_schema import ResponseRequest
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


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(24)}"


@dataclass
class OutputItem:
    """One item of the output so far."""

    type: str  # message, reasoning or function_call
    id: str
    index: int
    name: str = ""  # of the function
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    status: str = "in_progress"

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
    ) -> None:
        """`format` is how the model marks tool calls."""
        self.id = new_id("resp")
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
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [self._item(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if format is None else format.model_dump(by_alias=True)},
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": _usage(self._usage) if ended and self._usage is not None else None,
            "user": body.user,
        }

    def _item(self, item: OutputItem) -> dict[str, Any]:
        same = {"id": item.id, "type": item.type, "status": item.status}
        match item.type:
            case "function_call":
                return same | {"call_id": item.call_id, "name": item.name, "arguments": item.text}
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
        return created + self._response_event("response.in_progress")

    def add(self, delta: MessageDelta) -> bytes:
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
                return self._close() + self._start("function_call", name=name)
            case ToolCallArguments(_, more) if self._open is not None:
                self._open.pieces.append(more)
                return self._event("response.function_call_arguments.delta", self._open, delta=more)
            case ToolCallEnd():
                return self._close()
            case BadToolCall(index=int()):
                return self._close("incomplete")
        return b""

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
        cut = end.finish == "length"
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
        self._close("incomplete")

    def cancel(self) -> None:
        """The response was canceled."""
        self._status = "cancelled"
        self._close("incomplete")

    # -- items -----------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> OutputItem | None:
        """The item that is being written."""
        return self._items[-1] if self._items and self._items[-1].status == "in_progress" else None

    def _start(self, type: str, *, name: str = "") -> bytes:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[type]
        own = call_id(self._format) if type == "function_call" else ""
        item = OutputItem(type, new_id(prefix), len(self._items), name, own)
        self._items.append(item)
        return self._event("response.output_item.added", output_index=item.index, item=self._item(item))

    def _close(self, status: str = "completed") -> bytes:
        """The last events of the item that is being written."""
        item = self._open
        if item is None:
            return b""
        item.status = status
        if not self._body.stream:
            return b""
        if item.type == "function_call":
            written = self._event("response.function_call_arguments.done", item, arguments=item.text, name=item.name)
        else:
            kind = "reasoning_text" if item.type == "reasoning" else "output_text"
            ranked = {} if item.type == "reasoning" else {"logprobs": self._logprobs(item.tokens)}
            written = self._event(f"response.{kind}.done", item, content_index=0, text=item.text, **ranked)
            written += self._event("response.content_part.done", item, content_index=0, part=self._part(item))
        return written + self._event("response.output_item.done", output_index=item.index, item=self._item(item))

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


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
