"""Samples as text. A recording longer than the model's window is computed one window after the other.

Each window is a row of its own in the pipeline's shared batches: its text is final when it is there, so that streams
and whole responses are the same text; other requests come between; and a client that leaves stops at the next window.
Where a window ends within a sentence, the next one begins at the end of the last whole segment, if the model says when
that is. Models without windows (CTC, speech encoder-decoders) compute a recording at once, CTC in chunks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.pipelines.inputs.audio import MOST_SECONDS
from headway.server.errors import bad_request
from headway.server.pooling.models import PoolingModel

CHUNK_SECONDS = 20.0  # of a CTC model's chunks
LEAST_STEP = 0.5  # of a window: a model whose times do not move on is moved on


@dataclass(frozen=True)
class TimedText:
    """A text, or a word, and when it is said, in seconds of the recording."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class TranscriptPart:
    """What one window came to."""

    text: str
    segments: tuple[TimedText, ...] = ()
    words: tuple[TimedText, ...] = ()
    language: str | None = None


@dataclass(frozen=True)
class SpeechRequest:
    """How a recording is to be transcribed."""

    task: str  # transcribe or translate
    language: str | None = None
    temperature: float | None = None
    prompt: str | None = None  # a text before the first window
    segments: bool = False  # with times
    words: bool = False


def check_request(pool: PoolingModel, wanted: SpeechRequest) -> None:
    """Raise where the model cannot do what is asked for."""
    whisper = pool.task.speech == "whisper"
    if wanted.task == "translate" and not whisper:
        raise bad_request(
            f"{pool.name} does not translate; start the server with a Whisper model", "model", "unsupported"
        )
    if wanted.language is not None and not whisper:
        raise bad_request(f"{pool.name} has one language; remove language", "language", "unsupported")
    if wanted.language is not None:
        try:
            pool.task.check_language(wanted.language)
        except InvalidInput as error:
            raise bad_request(str(error), "language") from error
    if wanted.prompt is not None and not whisper:
        raise bad_request(f"{pool.name} takes no prompt; remove it", "prompt", "unsupported")
    if wanted.temperature and pool.task.speech == "ctc":
        raise bad_request(f"{pool.name} does not draw tokens; remove temperature", "temperature", "unsupported")
    if (wanted.segments or wanted.words) and pool.task.speech == "seq2seq":
        raise bad_request(
            f"{pool.name} has no times; use response_format json or text", "response_format", "unsupported"
        )
    _runs(pool, wanted)


async def transcribe(
    pool: PoolingModel, samples: np.ndarray, wanted: SpeechRequest
) -> AsyncGenerator[TranscriptPart, None]:
    """The parts of a transcript, in order."""
    if pool.task.speech != "whisper":
        yield await _at_once(pool, samples, wanted)
        return
    rate, window, begin = pool.task.rate, pool.task.window, 0
    if len(samples) > window and pool.task.has_timestamps and not wanted.segments:
        wanted = replace(wanted, segments=True)  # so that no window ends within a sentence
    while begin < len(samples):
        piece = samples[begin : begin + window]
        is_last = begin + window >= len(samples)
        part, whole = await _window(pool, piece, wanted, begin / rate)
        yield part
        step = len(piece) if is_last or whole is None else round(whole * rate)
        begin += step if step >= LEAST_STEP * window or is_last else len(piece)


async def _window(
    pool: PoolingModel, piece: np.ndarray, wanted: SpeechRequest, at: float
) -> tuple[TranscriptPart, float | None]:
    """The part of one window, and where its last whole segment ends, if the window ends within another."""
    results = [await pool.pipeline.submit(piece, **options) for options in _runs(pool, wanted)]
    first, seconds = results[0], len(piece) / pool.task.rate
    chunks: list[Mapping[str, Any]] = list(first.get("chunks") or ())
    language = next((chunk.get("language") for chunk in chunks if chunk.get("language")), wanted.language)
    if not (wanted.segments or wanted.words):
        return TranscriptPart(first["text"], language=language), None
    timed = first if wanted.segments else None
    segments = [] if timed is None else _timed(chunks, seconds)
    whole: float | None = None
    text = first["text"]
    if segments and len(segments) > 1 and chunks[-1]["timestamp"][1] is None:
        whole, segments = segments[-2].end, segments[:-1]  # the rest is computed again, with what follows it
        text = "".join(segment.text for segment in segments)
    words: list[TimedText] = []
    if wanted.words:
        words = _timed(results[-1].get("chunks") or (), seconds)
        words = words if whole is None else [word for word in words if word.start < whole]
    moved = [tuple(TimedText(one.text, one.start + at, one.end + at) for one in some) for some in (segments, words)]
    return TranscriptPart(text, moved[0], moved[1], language), whole


def _runs(pool: PoolingModel, wanted: SpeechRequest) -> list[dict[str, Any]]:
    """The pipeline's options: of one run, or of two, where both segments and words have times."""
    common: dict[str, Any] = {"max_seconds": MOST_SECONDS}
    if pool.task.speech == "ctc":
        unit = "word" if wanted.words or wanted.segments else None
        return [common | {"chunk_length_s": CHUNK_SECONDS, "return_timestamps": unit}]
    if wanted.temperature:
        common |= {"do_sample": True, "temperature": wanted.temperature, "num_beams": 1}
    if pool.task.speech != "whisper":
        return [common]
    if pool.task.is_multilingual:
        common |= {"task": wanted.task, "language": wanted.language, "return_language": wanted.language is None}
    elif wanted.task == "translate" or wanted.language not in (None, "en", "english"):
        raise bad_request(f"{pool.name} is for English only", "language" if wanted.language else "model", "unsupported")
    if wanted.prompt is not None:
        common["prompt"] = wanted.prompt
    units: list[Any] = [True] if wanted.segments else []
    units += ["word"] if wanted.words else []
    return [common | {"return_timestamps": unit} for unit in units or [False]]


async def _at_once(pool: PoolingModel, samples: np.ndarray, wanted: SpeechRequest) -> TranscriptPart:
    [options] = _runs(pool, wanted)
    result, seconds = await pool.pipeline.submit(samples, **options), len(samples) / pool.task.rate
    words = tuple(_timed(result.get("chunks") or (), seconds))
    segments = ()
    if wanted.segments and result["text"]:  # a CTC model has no sentences: the recording is one segment
        segments = (TimedText(result["text"], words[0].start if words else 0.0, words[-1].end if words else seconds),)
    return TranscriptPart(result["text"], segments, words if wanted.words else (), None)


def _timed(chunks: Any, seconds: float) -> list[TimedText]:
    """The pipeline's chunks; one that did not end within the recording ends with it, and none goes backwards."""
    timed: list[TimedText] = []
    for chunk in chunks:
        start, end = chunk["timestamp"]
        start = min(0.0 if start is None else float(start), seconds)
        end = min(seconds if end is None else float(end), seconds)
        timed.append(TimedText(chunk["text"], start, max(start, end)))
    return timed
