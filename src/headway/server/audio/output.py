"""A transcript in the formats of OpenAI's API: json, text, srt, vtt, verbose_json, and the events of a stream."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from headway.base.dataclass import dataclass
from headway.server.audio.transcriber import TimedText, TranscriptPart

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
TIMED = ("srt", "vtt", "verbose_json")  # that have segments with times
MEDIA_TYPES = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}


@dataclass
class SpeechTranscript:
    """What was said so far."""

    seconds: float  # of the recording
    parts: list[TranscriptPart] = field(default_factory=list)

    def add(self, part: TranscriptPart) -> str:
        """Add a part; returns the text that it adds."""
        text = part.text.lstrip() if not self.text else part.text
        self.parts.append(part)
        return text

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts).lstrip()

    @property
    def segments(self) -> list[TimedText]:
        return [segment for part in self.parts for segment in part.segments]

    @property
    def words(self) -> list[TimedText]:
        return [word for part in self.parts for word in part.words]

    @property
    def language(self) -> str | None:
        return next((part.language for part in self.parts if part.language), None)


def usage(seconds: float) -> dict[str, Any]:
    """A recording is counted by its length, in whole seconds."""
    return {"type": "duration", "seconds": max(1, round(seconds))}


def written(transcript: SpeechTranscript, format: str, *, task: str, units: Sequence[str], tokenizer: Any) -> Any:
    """A transcript in a format: a text, or an object that becomes JSON."""
    match format:
        case "json":
            return {"text": transcript.text, "usage": usage(transcript.seconds)}
        case "text":
            return transcript.text + "\n"
        case "srt":
            return "".join(
                f"{i}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_line(one.text)}\n\n"
                for i, one in enumerate(transcript.segments, 1)
            )
        case "vtt":
            cues = (
                f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{_cue(one.text)}\n\n"
                for one in transcript.segments
            )
            return "WEBVTT\n\n" + "".join(cues)
    return _verbose(transcript, task, units, tokenizer)


def _verbose(transcript: SpeechTranscript, task: str, units: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "task": task,
        "language": transcript.language,
        "duration": round(transcript.seconds, 3),
        "text": transcript.text,
        "usage": usage(transcript.seconds),
    }
    if "word" in units:
        result["words"] = [{"word": one.text.strip()} | _times(one) for one in transcript.words]
    if "segment" in units:
        result["segments"] = [_segment(i, one, tokenizer) for i, one in enumerate(transcript.segments)]
    return result


def _segment(number: int, one: TimedText, tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer(one.text, add_special_tokens=False).input_ids
    data = one.text.encode()
    ratio = len(data) / len(zlib.compress(data)) if data else 0.0
    return {"id": number, "text": one.text, "tokens": list(ids), "compression_ratio": round(ratio, 4)} | _times(one)


def _times(one: TimedText) -> dict[str, float]:
    return {"start": round(one.start, 3), "end": round(one.end, 3)}


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    minutes, ms = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{ms // 1000:02d}{point}{ms % 1000:03d}"


def _line(text: str) -> str:
    """A text on one line, which no empty line and no arrow of its own can end or begin a cue in."""
    return " ".join(text.split()).replace("-->", "->")


def _cue(text: str) -> str:
    return _line(text).replace("&", "&amp;").replace("<", "&lt;")
