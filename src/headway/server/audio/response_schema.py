"""The fields of transcripts, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from headway.server.api.response_schema import QUEUE_ERRORS, Responses, ResponseSchema


class AudioUsage(ResponseSchema):
    type: Literal["duration"]
    seconds: int


class TimedWord(ResponseSchema):
    word: str
    start: float
    end: float


class TimedSegment(ResponseSchema):
    id: int
    text: str
    tokens: list[int]
    compression_ratio: float
    start: float
    end: float


class TranscriptionResponse(ResponseSchema):
    """json has the text and the usage, verbose_json all of it."""

    text: str
    usage: AudioUsage
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = None
    duration: float | None = None
    words: list[TimedWord] | None = None
    segments: list[TimedSegment] | None = None


TEXTS = ("text/plain", "application/x-subrip", "text/vtt", "text/event-stream")
TRANSCRIPT: Responses = QUEUE_ERRORS | {
    200: {
        "model": TranscriptionResponse,
        "description": "The transcript in the requested format; with `stream`, server-sent events.",
        "content": {name: {"schema": {"type": "string"}} for name in TEXTS},
    }
}
