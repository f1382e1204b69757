"""A message as content blocks, and as the events of its stream in Anthropic's order.

message_start
for each block:  content_block_start, content_block_delta …, content_block_stop
message_delta, message_stop; or error
"""

from __future__ import annotations

import json
import secrets
from dataclasses import field
from typing import Any

from headway.base.dataclass import dataclass
from headway.server.api.streaming import EVENTS, json_bytes
from headway.server.chats.message_job import MessageEnd, MessageUsage
from headway.server.chats.message_stream import MessageDelta, call_id
from headway.server.errors import ANTHROPIC, ApiError, error_body
from headway.text.replies.parts import (
    BadToolCall,
    Content,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


@dataclass
class OutputBlock:
    """One content block so far."""

    type: str  # text, thinking or tool_use
    id: str = ""  # of a call
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def fields(self) -> dict[str, Any]:
        match self.type:
            case "text":
                return {"type": "text", "text": self.text, "citations": None}
            case "thinking":
                return {"type": "thinking", "thinking": self.text, "signature": ""}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": self._input()}

    def _input(self) -> Any:
        try:
            return json.loads(self.text or "{}")
        except ValueError:  # it was cut off
            return {}


class MessageWriter:
    """Writes one message. It is the `MessageFormat` of this API."""

    media_type = EVENTS

    def __init__(self, *, model: str, format: str | None, prompt_tokens: int, stream: bool) -> None:
        """`format` is how the model marks tool calls."""
        self._format = format
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model, self._stream = model, stream
        self._usage = MessageUsage(prompt=prompt_tokens)
        self._blocks: list[OutputBlock] = []
        self._open = False  # whether the last block is being written
        self._end: MessageEnd | None = None

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [block.fields() for block in self._blocks],
            **self._stop(),
            "usage": self._counts(),
        }

    def _stop(self) -> dict[str, Any]:
        end = self._end
        if end is None:
            return {"stop_reason": None, "stop_sequence": None}
        if end.finish == "stop" and end.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
        return {"stop_reason": STOP_REASONS[end.finish], "stop_sequence": None}

    def _counts(self) -> dict[str, Any]:
        """Tokens as Anthropic counts them: those of the cache are not among the input's."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }

    # -- the stream ------------------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        return self._event("message_start", message=self.whole())

    def add(self, delta: MessageDelta) -> bytes:
        return b"".join(map(self._add_part, delta.parts))

    def _add_part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._add_text("text", text)
            case Reasoning(text):
                return self._add_text("thinking", text)
            case ToolCallStart(_, name):
                return self._start(OutputBlock("tool_use", call_id(self._format).replace("call_", "toolu_"), name))
            case ToolCallArguments(_, more) if self._open:
                self._blocks[-1].pieces.append(more)
                return self._delta({"type": "input_json_delta", "partial_json": more})
            case ToolCallEnd() | BadToolCall(index=int()):
                return self._close()
        return b""

    def _add_text(self, type: str, text: str) -> bytes:
        written = b""
        if not self._open or self._blocks[-1].type != type:
            written = self._start(OutputBlock(type))
        self._blocks[-1].pieces.append(text)
        kind, name = DELTAS[type]
        return written + self._delta({"type": kind, name: text})

    def _start(self, block: OutputBlock) -> bytes:
        written = self._close()
        self._blocks.append(block)
        self._open = True
        return written + self._event("content_block_start", index=len(self._blocks) - 1, content_block=block.fields())

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        written = self._delta({"type": "signature_delta", "signature": ""}) if self._is_thinking else b""
        return written + self._event("content_block_stop", index=len(self._blocks) - 1)

    @property
    def _is_thinking(self) -> bool:
        return self._blocks[-1].type == "thinking"

    def end(self, end: MessageEnd) -> bytes:
        written = self._close()
        self._end, self._usage = end, end.usage
        written += self._event("message_delta", delta=self._stop(), usage=self._counts())
        return written + self._event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error, ANTHROPIC) + b"\n\n"

    def _event(self, type: str, **fields: Any) -> bytes:
        if not self._stream:
            return b""
        return f"event: {type}\ndata: ".encode() + json_bytes({"type": type, **fields}) + b"\n\n"
