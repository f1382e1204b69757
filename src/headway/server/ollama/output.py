"""A message as JSON lines: one for what is ready, and a last one with the reason, the counts and the times."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from headway.program.engine import Engine
from headway.server.api.streaming import JSON_LINES, json_bytes
from headway.server.api.tokens import ScoredToken, chat_logprobs
from headway.server.chats.message_job import MessageEnd
from headway.server.chats.message_stream import MessageDelta
from headway.server.errors import OLLAMA, ApiError, error_body
from headway.text.replies.parts import Content, Reasoning, ToolCallEnd, ToolCallStart

DONE_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop"}


def timestamp() -> str:
    """The time now, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LineWriter:
    """Writes one message of a chat, or the text of `/api/generate`. It is the `MessageFormat` of this API."""

    media_type = JSON_LINES

    def __init__(
        self, engine: Engine, *, model: str, chat: bool, ranked: bool, stream: bool, start: int, ready: int
    ) -> None:
        """`start` is when the request came, and `ready` when its model was loaded, as `perf_counter_ns` has it."""
        self._engine, self._model, self._chat, self._ranked, self._stream = engine, model, chat, ranked, stream
        self._start, self._ready = start, ready
        self._first: int | None = None  # when the first token came
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._names: dict[int, str] = {}  # of calls, by their index
        self._calls: list[dict[str, Any]] = []
        self._tokens: list[ScoredToken] = []
        self._last: dict[str, Any] = {}

    def begin(self) -> bytes:
        return b""

    def add(self, delta: MessageDelta) -> bytes:
        if self._first is None:
            self._first = time.perf_counter_ns()
        texts, thoughts, calls = [], [], []
        for part in delta.parts:
            match part:
                case Content(text):
                    texts.append(text)
                case Reasoning(text):
                    thoughts.append(text)
                case ToolCallStart(index, name):
                    self._names[index] = name
                case ToolCallEnd(index, arguments):
                    called = {"index": index, "name": self._names[index], "arguments": arguments}
                    calls.append({"id": f"call_{secrets.token_hex(4)}", "function": called})
        tokens = list(delta.tokens) if self._ranked else []
        self._texts += texts
        self._thoughts += thoughts
        self._calls += calls
        self._tokens += tokens
        if not self._stream or not (texts or thoughts or calls or tokens):
            return b""
        return self._line(self._content("".join(texts), "".join(thoughts), calls, tokens) | {"done": False})

    def end(self, end: MessageEnd) -> bytes:
        now = time.perf_counter_ns()
        first = self._first or now
        waited = round((end.usage.queue_seconds or 0.0) * 1e9)
        self._last = {
            "done": True,
            "done_reason": DONE_REASONS[end.finish],
            "total_duration": now - self._start,
            "load_duration": self._ready - self._start,
            "prompt_eval_count": end.usage.prompt,
            "prompt_eval_duration": max(0, first - self._ready - waited),
            "eval_count": end.usage.completion,
            "eval_duration": now - first,
        }
        return self._line(self._content("", "", [], []) | self._last) if self._stream else b""

    def failed(self, error: ApiError) -> bytes:
        return error_body(error, OLLAMA) + b"\n"

    def whole(self) -> dict[str, Any]:
        content = self._content("".join(self._texts), "".join(self._thoughts), self._calls, self._tokens)
        return self._head() | content | self._last

    def _content(
        self, text: str, thought: str, calls: Sequence[dict[str, Any]], tokens: Sequence[ScoredToken]
    ) -> dict[str, Any]:
        """What was generated, as a message or as a text."""
        thinking = {"thinking": thought} if thought else {}
        ranked = {"logprobs": chat_logprobs(tokens, self._engine)["content"]} if tokens else {}
        if not self._chat:
            return {"response": text, **thinking, **ranked}
        called = {"tool_calls": list(calls)} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **called}, **ranked}

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": timestamp()}

    def _line(self, fields: dict[str, Any]) -> bytes:
        return json_bytes(self._head() | fields) + b"\n"


def loaded(model: str, *, chat: bool, reason: str = "load") -> dict[str, Any]:
    """The response to a request that only loads the model, or unloads it: it has no messages, or no prompt."""
    content: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": model, "created_at": timestamp(), **content, "done": True, "done_reason": reason}
