"""Requests of every API that computes, and what the server's log and its traces say of them."""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass
from typing import Any

from headway.server import logs
from support import senses
from support.collector import Collector
from support.live import Answer, Live

SECRET = "zebra"  # in every prompt
USER = [{"role": "user", "content": f"a {SECRET}"}]
ON = {"ignore_eos": True}
SURE = {"num_predict": 4, "seed": 3}  # its first token does not end the text
WAV = senses.wav_file(senses.tone(1.5, seed=1))


class Lines(logging.Handler):
    """The lines of the log, as they are formatted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(logs._fields(record))


@dataclass(frozen=True)
class Call:
    """A request of one API: what is sent, and what its operation is called."""

    path: str
    operation: str
    body: dict[str, Any] | None  # None: the form of a recording
    is_text: bool = True  # it generates tokens


CALLS = (
    Call(
        "/v1/chat/completions",
        "chat",
        {"messages": USER, "max_tokens": 4, **ON, "temperature": 0.5, "top_p": 0.9},
    ),
    Call("/v1/chat/completions", "chat", {"messages": USER, "max_tokens": 4, **ON, "stream": True, "n": 2}),
    Call(
        "/v1/completions",
        "text_completion",
        {"prompt": f"a {SECRET}", "max_tokens": 4, **ON, "seed": 7, "top_k": 5},
    ),
    Call(
        "/v1/completions",
        "text_completion",
        {"prompt": f"a {SECRET}", "max_tokens": 4, **ON, "stream": True},
    ),
    Call(
        "/v1/responses",
        "chat",
        {"input": f"a {SECRET}", "max_output_tokens": 16, **ON, "temperature": 0.5},
    ),
    Call("/v1/responses", "chat", {"input": f"a {SECRET}", "max_output_tokens": 16, **ON, "stream": True}),
    Call("/v1/messages", "chat", {"messages": USER, "max_tokens": 4, **ON, "temperature": 0.5}),
    Call("/v1/messages", "chat", {"messages": USER, "max_tokens": 4, **ON, "stream": True}),
    Call("/api/chat", "chat", {"model": "smollm2", "messages": USER, "options": SURE}),
    Call("/api/generate", "text_completion", {"model": "smollm2", "prompt": SECRET, "options": SURE}),
    Call("/v1/embeddings", "embeddings", {"input": f"a {SECRET}"}, is_text=False),
    Call("/pooling", "embeddings", {"input": f"a {SECRET}"}, is_text=False),
    Call("/api/embed", "embeddings", {"model": "small-embed", "input": f"a {SECRET}"}, is_text=False),
    Call("/v1/score", "score", {"text_1": f"a {SECRET}", "text_2": ["a zoo"]}, is_text=False),
    Call("/rerank", "rerank", {"query": f"a {SECRET}", "documents": ["a zoo"]}, is_text=False),
    Call("/classify", "classify", {"input": f"a {SECRET}"}, is_text=False),
    Call("/v1/audio/transcriptions", "transcribe", None, is_text=False),
    Call("/v1/audio/translations", "translate", None, is_text=False),
)


class Faces:
    """The server with all of them, its log and its collector."""

    def __init__(self, server: Live, lines: Lines, spans: Collector) -> None:
        self.server, self.lines, self.spans = server, lines, spans

    def send(self, call: Call, **headers: str) -> tuple[str, Answer]:
        """A request's id, and its response."""
        id = f"test-{secrets.token_hex(8)}"
        body, kind = (form(WAV), "multipart/form-data; boundary=x") if call.body is None else (call.body, "")
        more = {"content-type": kind} if kind else {}
        answer = self.server.ask("POST", call.path, body, {"x-request-id": id, **more, **headers})
        return id, answer

    def line(self, id: str, message: str = "request") -> dict[str, Any]:
        """The line of a request."""

        def found() -> Any:
            return [one for one in list(self.lines.seen) if (one["message"], one.get("request_id")) == (message, id)]

        (line,) = self.server.until(found)
        return line


def form(file: bytes) -> bytes:
    head = b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    parts = ((b"model", b"", b"small-whisper"), (b"file", b'; filename="a.wav"', file))
    return b"".join(head % part for part in parts) + b"--x--\r\n"


def written(spans: list[Any]) -> str:
    """Everything that spans say."""
    return json.dumps([[one.name, one.attributes] for one in spans])
